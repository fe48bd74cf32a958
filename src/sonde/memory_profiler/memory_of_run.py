"""The memory that a run has recorded, as snapshots: the process, and what parameters, gradients and optimizer state take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from sonde.events import Site
from sonde.memory_profiler.memory_report import ProcessMemory, Snapshot, Usage
from sonde.run_view import RunView, newest_views
from sonde.runlog.run_reader import Run

Source = Run | Path | str
MB = 2**20
MAX_SNAPSHOTS = 10  # at equal distances: the first, the last, and some between


def snapshots_of_run(run: Source) -> list[Snapshot]:
    """Of the lowest rank. Activations and, where no switch measured it, the optimizer state are not known."""
    source = run if isinstance(run, Run) else Run(run)
    view = next(iter(newest_views(source).values()), None)
    return list(_snapshots(view)) if view is not None else []


def _snapshots(view: RunView) -> Iterator[Snapshot]:
    resident_mb, device_mb = view.steps["rss_mb"], view.steps["cuda_mb"]
    rows = [row for row in range(view.num_steps) if not (math.isnan(resident_mb[row]) and math.isnan(device_mb[row]))]
    chosen = sorted({rows[round(i * (len(rows) - 1) / (MAX_SNAPSHOTS - 1))] for i in range(MAX_SNAPSHOTS)}) if rows else []
    parameters = [site for site in view.sites.values() if site.kind == "parameter"]
    places = {"parameters": _by_module(parameters), "gradients": _by_module([site for site in parameters if site.trainable])}
    seconds = _seconds(view)
    for row in chosen:
        state_mb = view.steps["optimizer_state_mb"][row]
        state = {"optimizer state": {"": int(state_mb * MB)}} if state_mb > 0 else {}
        device = "cuda" if device_mb[row] > 0 else "cpu"
        rss = int(resident_mb[row] * MB) if resident_mb[row] > 0 else None
        yield Snapshot(f"step {view.step_number(row)}", seconds[row], {device: Usage(places | state)}, ProcessMemory(rss))


def _by_module(sites: list[Site]) -> dict[str, int]:
    found: dict[str, int] = {}
    for site in sites:
        path = f"{site.model}.{site.module}" if site.model else site.module
        found[path] = found.get(path, 0) + site.num_bytes
    return found


def _seconds(view: RunView) -> list[float]:
    """Since the start of the first step, at the end of each."""
    total, ends = 0.0, []
    for step_ms in view.steps["step_ms"].tolist():
        total += step_ms / 1e3 if step_ms > 0 else 0.0
        ends.append(total)
    return ends
