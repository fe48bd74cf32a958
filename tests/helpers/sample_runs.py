"""Runs for tests of the reading half, written by the real Writer from numbers that a test chooses. No torch needed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sonde.events import STATISTICS, STEP_SCALARS, Event, Kind, Site
from sonde.runlog.run_directory import write_run_json
from sonde.runlog.writer import Writer

CALLS = {"forwards": 1, "backwards": 1, "zero_grads": 1, "optimizer_steps": 1}
LOOP = CALLS | {"lr": 0.1, "grad_norm": 1.0, "step_ms": 10.0}
WEIGHT, OUTPUT = 1000, 2000


def write_sample_run(
    path: Path,
    losses: Iterable[float] = (),
    *,
    scalars: Mapping[str, float] | None = None,
    layers: tuple[str, ...] = ("encoder", "head"),
    events: Iterable[Event] = (),
    ending: Mapping[str, Any] | None = None,
    bad_layer: str = "",
) -> Path:
    """A run of one process with one step per loss; all statistics are measured in every tenth step.

    `scalars` replaces those of a sound loop, `bad_layer` puts out NaN, and `ending` is None for a run that was killed.
    """
    path.mkdir(parents=True, exist_ok=True)
    write_run_json(path, {"name": path.name})
    writer = Writer(path)
    names = STEP_SCALARS
    sites = [Site(i, "scalar", name) for i, name in enumerate(names)]
    for i, name in enumerate(layers):
        sites.append(Site(WEIGHT + i, "parameter", f"{name}.weight", type="Linear", shape=(8, 8)))
        sites.append(Site(OUTPUT + i, "output", name, type="Linear", shape=(32, 8)))
    writer.sites(sites)
    step_plan = writer.plan(Kind.STEP, ("value",), range(len(names)))
    weights = writer.plan(Kind.GRADIENT, STATISTICS, range(WEIGHT, WEIGHT + len(layers)))
    outputs = writer.plan(Kind.ACTIVATION, STATISTICS, range(OUTPUT, OUTPUT + len(layers)))
    writer.event("start", 0, {"argv": ["train.py"], "script": "train.py", "torch": "2.13.0"})
    writer.event("model", 0, {"model": "", "class": "Net", "num_parameters": 128, "num_trainable": 128})
    writer.event("optimizer", 0, {"optimizer": 0, "class": "SGD", "groups": [{"lr": 0.1}], "source": "train.py:9"})
    for event in events:
        writer.event(event.kind, event.step, event.data)
    number = -1
    for number, loss in enumerate(losses):
        values = dict.fromkeys(names, 0.0) | LOOP | (scalars or {}) | {"loss": loss, "sonde_ms": 0.1}
        if number % 10 == 0:
            values["observed"] = 1.0
            row = [64.0, 0.1, 1.0, -2.0, 2.0, 8.0, 0.0, 0.0, 0.0]
            writer.frame(weights, number, np.array([row for _ in layers]))
            bad = [64.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 60.0, 4.0]
            writer.frame(outputs, number, np.array([bad if name == bad_layer else row for name in layers]))
        if not math.isfinite(loss):  # the guard says so: a scalar that is NaN may as well not have been measured
            counts = {"num_nan": int(math.isnan(loss)), "num_inf": int(math.isinf(loss)), "num_elements": 1}
            writer.event("nonfinite", number, {"what": "loss", "where": "loss", **counts})
        writer.frame(step_plan, number, np.array([[values[name]] for name in names]))
        writer.flush()
    if ending is not None:
        writer.event("end", max(number, 0), {"how": "finished", "exit_code": 0, "exception": "", **ending})
    writer.close()
    return path


def sources(line: str = "train.py:41", text: str = "optimizer.step()") -> list[Event]:
    return [Event("source", 0, {"call": "optimizer_step", "line": line, "text": text, "optimizer": 0})]
