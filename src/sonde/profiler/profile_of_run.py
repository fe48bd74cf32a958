"""The times that a run has recorded as a profile: phases of the steps, and layers of the steps that the session measured in detail."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sonde.events import ModelWatched, StepProfile
from sonde.profiler.profile_report import PHASES, LayerCost, ProfileReport, TimeSpread
from sonde.run_view import newest_views
from sonde.run_view.step_times import SETTLED
from sonde.runlog.run_reader import Run


def profile_of_run(run: Run | Path | str) -> ProfileReport | None:
    """Of the lowest rank; None if no step was timed."""
    source = run if isinstance(run, Run) else Run(run)
    view = next(iter(newest_views(source).values()), None)
    if view is None:
        return None
    step_ms, own_ms = view.steps["step_ms"], view.steps["sonde_ms"]
    is_timed = np.isfinite(step_ms) & np.isfinite(own_ms)
    if int(np.count_nonzero(is_timed)) > 2 * SETTLED:
        is_timed[np.flatnonzero(is_timed)[:SETTLED]] = False  # the first steps fill caches
    if not is_timed.any():
        return None
    columns = {phase: view.steps[f"{phase}_ms"][is_timed] for phase in PHASES}
    layers = _layers(view.events(StepProfile))
    notes = [f"from the run: {int(np.count_nonzero(is_timed)):,} steps, without the time of Sonde"]
    if layers:
        notes.append(f"layers: {len(view.events(StepProfile))} steps that the session measured in detail, with the time of measuring")
    else:
        notes.append("no step was measured layer by layer. The layers: profiler.profile(model, inputs), or performance_profiling_frequency")
    return ProfileReport(
        title=next((model.class_name for model in view.events(ModelWatched)), ""),
        layers=layers,
        step=TimeSpread.of((step_ms - own_ms)[is_timed].tolist()),
        phases={phase: TimeSpread.of(times.tolist()) for phase, times in columns.items() if np.isfinite(times).all() and times.any()},
        notes=tuple(notes),
    )


def _layers(profiles: Sequence[StepProfile]) -> tuple[LayerCost, ...]:
    forward, backward, kinds, calls = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list), {}, {}
    for profile in profiles:
        for row in profile.layers:
            path = str(row.get("path", ""))
            kinds[path], calls[path] = str(row.get("type", "")), float(row.get("num") or 1.0)
            for times, value in ((forward, row.get("forward_ms")), (backward, row.get("backward_ms"))):
                if isinstance(value, (int, float)):
                    times[path].append(float(value))
    return tuple(
        LayerCost(path, kind, path.count(".") + 1, calls[path], TimeSpread.of(forward[path]), TimeSpread.of(backward[path]),
                  TimeSpread.of(forward[path]), TimeSpread.of(backward[path]))
        for path, kind in kinds.items()
    )  # fmt: skip
