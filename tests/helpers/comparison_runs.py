"""Runs for comparing, written by the real Writer: every number can be chosen, so that two of them part where a test wants them to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sonde.events import BATCH_FIELDS, STATISTICS, STEP_SCALARS, Kind, Site
from sonde.runlog.run_directory import write_run_json
from sonde.runlog.writer import Writer

LAYERS = ("encoder", "middle", "head")
SOUND = {
    "forwards": 1, "backwards": 1, "zero_grads": 1, "optimizer_steps": 1, "lr": 0.1, "grad_norm": 1.0,
    "step_ms": 10.0, "sonde_ms": 0.1, "forward_ms": 3.0, "backward_ms": 5.0, "optimizer_ms": 1.0,
}  # fmt: skip
KINDS = {Kind.PARAMETER: "parameter", Kind.ACTIVATION: "output", Kind.ACTIVATION_GRADIENT: "output", Kind.GRADIENT: "parameter",
         Kind.UPDATE: "parameter"}  # fmt: skip
ROW = dict(zip(STATISTICS, (64.0, 0.1, 1.0, -2.0, 2.0, 8.0, 0.0, 0.0, 0.0)))

Change = tuple[int, str, str]  # from which step on, which kind, which layer


def write_pair_run(
    path: Path,
    losses: Sequence[float],
    *,
    observed: Iterable[int] = range(0, 10_000, 10),
    changes: Mapping[Change, Mapping[str, float]] | None = None,
    scalars: Mapping[str, Sequence[float] | float] | None = None,
    layers: Sequence[str] = LAYERS,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    about: Mapping[str, Any] | None = None,
    ending: Mapping[str, Any] | None = None,
    killed: bool = False,
    rank: int = 0,
    bad_events: bool = True,
    logged: Mapping[str, Sequence[float]] | None = None,
    optimizer: str = "SGD",
) -> Path:
    """One step per loss. `changes` replaces statistics from a step on; a scalar is one number for all steps, or one for each."""
    path.mkdir(parents=True, exist_ok=True)
    info = {"argv": ["train.py", "--lr", "0.1"], "python": "3.11", "torch": "2.13.0", "threads": 2, "native_kernel": True}
    info |= about or {}
    write_run_json(path, {"name": path.name, **info})
    writer = Writer(path, rank=rank, manifest=info)
    given = SOUND | dict(scalars or {})
    names = [*STEP_SCALARS, *(name for name in given if name not in STEP_SCALARS)]
    sites = [Site(i, "scalar", name) for i, name in enumerate(names)]
    first = {"parameter": 1000, "output": 2000}
    for place, layer in enumerate(layers):
        shape = (shapes or {}).get(layer, (8, 8))
        sites.append(Site(1000 + place, "parameter", f"{layer}.weight", type="Linear", shape=shape, dtype="float32"))
        sites.append(Site(2000 + place, "output", layer, type="Linear", shape=(32, *shape[1:]), dtype="float32"))
    sites.append(Site(3000, "input", "batch.0", shape=(32, 8), dtype="float32"))
    sites += [Site(4000 + i, "scalar", name) for i, name in enumerate(logged or {})]
    writer.sites(sites)
    step_plan = writer.plan(Kind.STEP, ("value",), range(len(names)))
    plans = {kind: writer.plan(kind, STATISTICS, [first[of] + i for i in range(len(layers))]) for kind, of in KINDS.items()}
    batch = writer.plan(Kind.BATCH, BATCH_FIELDS, [3000])
    log_plan = writer.plan(Kind.LOG, ("value",), [4000 + i for i in range(len(logged or {}))])
    writer.event("start", 0, info)
    writer.event("model", 0, {"model": "", "class": "Net", "num_parameters": 192})
    writer.event("optimizer", 0, {"optimizer": 0, "class": optimizer, "groups": [{"lr": 0.1}], "source": "train.py:9", "text": ""})
    seen = set(observed)
    for number, loss in enumerate(losses):
        if number in seen:
            for kind, plan in plans.items():
                writer.frame(plan, number, np.array([_row(number, kind, layer, changes or {}) for layer in layers]))
            row = _row(number, Kind.BATCH, "batch", changes or {})
            changed = [change["hash"] for (since, _, _), change in (changes or {}).items() if "hash" in change and number >= since]
            writer.frame(batch, number, np.array([[*row, 32.0, *(changed or [float(number)])]]))
        if bad_events and not np.isfinite(loss):
            writer.event("nonfinite", number, {"what": "loss", "where": "loss", "num_elements": 1})
        if logged:
            writer.frame(log_plan, number, np.array([[values[number]] for values in logged.values()]))
        values = dict.fromkeys(names, 0.0) | {n: v if isinstance(v, (int, float)) else v[number] for n, v in given.items()}
        values |= {"loss": loss, "observed": float(number in seen)}
        writer.frame(step_plan, number, np.array([[values[name]] for name in names]))
        writer.flush()
    if not killed:
        writer.event("end", max(len(losses) - 1, 0), {"how": "finished", "exit_code": 0, "exception": "", **(ending or {})})
    writer.close()
    return path


def _row(number: int, kind: str, layer: str, changes: Mapping[Change, Mapping[str, float]]) -> list[float]:
    row = ROW | {"mean": 0.1 + number / 1000}
    for (since, changed_kind, changed_layer), change in changes.items():
        if (changed_kind, changed_layer) == (kind, layer) and number >= since:
            row |= {name: value for name, value in change.items() if name != "hash"}
    return list(row.values())


def falling(num: int, noise: float = 0.05, seed: int = 0, floor: float = 0.2, scale: float = 1.0) -> list[float]:
    """A loss that falls from about two, with the noise of batches."""
    rng = np.random.default_rng(seed)
    steps = np.arange(num)
    return (scale * ((2.0 * np.exp(-steps / 60) + floor) * (1 + noise * rng.standard_normal(num)))).tolist()
