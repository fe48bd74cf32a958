"""Runs made by hand: the log of a small classifier that learns, and every part of it can be changed.

By default only some steps carry statistics (the first dozen, then every fifteenth), as the budget of a real run allows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import exp, isfinite, isnan, log, nan
from pathlib import Path
from typing import Any

import numpy as np

from sonde.events import BATCH_FIELDS, STATISTICS, Event, Finding, Frame, Kind, Site, Step
from sonde.rules.rule import NotEvaluated, Result, Rule
from sonde.run_view import RunView, newest_views
from sonde.runlog import record_format as f
from sonde.runlog.run_reader import Run

LAYERS = ("net.0", "net.2", "net.4", "net.6", "head")
OUTPUT_IDS = {path: 100 + index for index, path in enumerate(LAYERS)}
PARAMETER_IDS = {
    f"{path}.{leaf}": 200 + 2 * index + part for index, path in enumerate(LAYERS) for part, leaf in enumerate(("weight", "bias"))
}
SITES: dict[int, Site] = {
    number: Site(number, "output", path, "model", "Linear", shape=(32, 64)) for path, number in OUTPUT_IDS.items()
} | {
    number: Site(number, "parameter", path, "model", "Linear", shape=(64, 64) if path.endswith("weight") else (64,))
    for path, number in PARAMETER_IDS.items()
}

Rows = Mapping[str, Mapping[str, float]]


def row(**given: float) -> dict[str, float]:
    """Statistics of a tensor of a thousand numbers; what is not given is ordinary."""
    return {"num": 1000, "mean": 0.01, "std": 0.5, "min": -1.5, "max": 1.5, "l2": 15.0, "zeros": 0, "nan": 0, "inf": 0} | given


def falling(step: int) -> float:
    """A loss that begins at ln 10 and falls, with a little noise."""
    return 0.1 + (log(10) - 0.1) * exp(-step / 20) + 0.05 * noise(step)


def stuck(step: int) -> float:
    return log(10) + 0.02 * noise(step)


def noise(step: int) -> float:
    """In [-1, 1], the same on every machine."""
    return ((step * 2654435761) % 1000) / 500 - 1


def opening(**membership: Any) -> list[Event]:
    """What a run says before its first step ends."""
    owned = {"optimizer": 0, "class": "Adam", "num_owned": 10, "num_foreign": 0, "num_foreign_with_grad": 0, "foreign": []}
    return [
        Event("model", 0, {"model": "model", "class": "Net", "num_parameters": 5000}),
        Event("output", 0, {"model": "model", "shape": [32, 10], "dtype": "float32"}),
        Event("optimizer", 0, {"optimizer": 0, "class": "Adam", "groups": [{"lr": 1e-3}], "source": "train.py:12"}),
        Event("membership", 0, {"num_unowned": 0, "unowned": [], "optimizers": [owned]} | membership),
        Event("source", 0, {"call": "forward", "line": "train.py:19", "text": "out = model(x)"}),
        Event("source", 0, {"call": "backward", "line": "train.py:20", "text": "loss.backward()", "series": "loss"}),
        Event("source", 0, {"call": "optimizer_step", "line": "train.py:21", "text": "optimizer.step()", "optimizer": 0}),
        Event("source", 0, {"call": "zero_grad", "line": "train.py:18", "text": "optimizer.zero_grad()"}),
    ]


def with_replaced_head(steps: Sequence[Step], at: int, known: int) -> list[Step]:
    """The same, with a head that is replaced in step `at` after the optimizer was built, which ownership shows from step `known` on."""
    new = {790: Site(790, "parameter", "head.weight", "model", "Linear", shape=(64, 64))}
    held = {"optimizer": 0, "class": "Adam", "num_owned": 8, "num_foreign": 1, "num_foreign_with_grad": 0, "foreign": ["(64, 64)"]}
    stale = Event("membership", known, {"num_unowned": 1, "unowned": ["head.weight"], "optimizers": [held]})
    old, changed = PARAMETER_IDS["head.weight"], []
    for step in steps:
        frames = dict(step.frames)
        for kind in (Kind.GRADIENT, Kind.UPDATE) if step.number >= at else ():
            if kind in frames:
                new_row = row(l2=0.2 if kind == Kind.GRADIENT else 0.0) if step.number >= known else None
                frames[kind] = _with_rows(frames[kind], old, row(num=0, l2=0.0), 790, new_row)
        events = (*step.events, stale) if step.number == known else step.events
        changed.append(replace(step, frames=frames, events=events, sites={**step.sites, **new}))
    return changed


def _with_rows(table: Frame, old: int, old_row: Mapping[str, float], new: int, new_row: Mapping[str, float] | None) -> Frame:
    values = table.values.copy()
    values[:, table.sites == old] = np.array([[old_row[name]] for name in STATISTICS])
    if new_row is None:
        return replace(table, values=values)
    added = np.array([[new_row[name]] for name in STATISTICS])
    return replace(table, sites=np.append(table.sites, np.uint32(new)), values=np.concatenate([values, added], axis=1))


def xray(step: int, **given: Any) -> Event:
    """A look at one step in which nothing stands out."""
    lines = [
        {"line": "train.py:19", "text": "out = model(x)", "function": "main", "num": 1, "ms": 3.0},
        {"line": "train.py:20", "text": "loss.backward()", "function": "main", "num": 1, "ms": 5.0},
        {"line": "train.py:21", "text": "optimizer.step()", "function": "main", "num": 1, "ms": 0.5},
    ]
    layers = [
        {"path": path, "type": "Linear", "dtype": "float32", "num": 1, "forward_ms": 0.6, "backward_ms": 0.9, "multiplications": 2e7,
         "elements": 1e5}
        for path in LAYERS
    ]  # fmt: skip
    machine = {"threads": 1, "cores": 2.0, "load": 0.5, "cpu_share": 1.0, "pushed_off_per_s": 3.0}
    about = {
        "why": "", "lines": lines, "waits": [], "layers": layers, "num_transfers": 0, "machine": machine, "fetch_ms": 0.4,
        "fetch_cpu_ms": 0.4,
    }  # fmt: skip
    return Event("xray", step, about | given)


def parameter_rows(step: int, **given: float) -> dict[str, dict[str, float]]:
    """Weights that move a little from step to step."""
    return {path: row(mean=0.01 + 1e-5 * step, l2=8.0 + 1e-4 * step) | given for path in PARAMETER_IDS}


def sometimes(step: int) -> bool:
    return step < 12 or step % 15 == 0


def training(
    num_steps: int = 100,
    *,
    loss: Callable[[int], float] = falling,
    scalars: Callable[[int], Mapping[str, float]] = lambda step: {},
    frames: Callable[[int], Mapping[str, Rows]] = lambda step: {},
    events: Mapping[int, Sequence[Event]] | None = None,
    start: Sequence[Event] | None = None,
    observed: Callable[[int], bool] = sometimes,
    rank: int = 0,
) -> list[Step]:
    """A training of so many steps. `frames(step)` replaces whole kinds of rows; an empty mapping takes a kind away."""
    steps = []
    for number in range(num_steps):
        values = {
            "loss": loss(number), "grad_norm": 0.6 + 0.1 * noise(number), "lr": 1e-3, "loss_scale": nan, "forwards": 1, "backwards": 1,
            "eval_forwards": float(number % 50 == 49), "zero_grads": 1, "clips": 0, "optimizer_steps": 1, "skipped_steps": 0,
            "manual_updates": 0, "scheduler_steps": 0, "stale_updates": 0, "empty_updates": 0, "cleared_updates": 0,
            "root_in_eval": 0, "mode_modules": 2,
            "mode_modules_in_eval": 0, "step_ms": 10.0, "sonde_ms": 0.1, "observed": float(observed(number)),
            "data_ms": 0.4, "transfer_ms": 0.0, "forward_ms": 3.0, "backward_ms": 5.0, "optimizer_ms": 0.5, "validation_ms": 0.0,
            "checkpoint_ms": 0.0, "other_ms": 1.0, **({"rss_mb": 300.0, "kept_graphs": 0.0} if observed(number) else {}),
        } | dict(scalars(number))  # fmt: skip
        tables: dict[str, Rows] = {}
        if observed(number):
            tables = {
                Kind.ACTIVATION: {path: row() for path in LAYERS},
                Kind.ACTIVATION_GRADIENT: {path: row(l2=0.1, zeros=500) for path in LAYERS},
                Kind.PARAMETER: parameter_rows(number),
                Kind.GRADIENT: {path: row(l2=0.2, min=-0.1, max=0.1) for path in PARAMETER_IDS},
                Kind.UPDATE: {path: row(l2=0.05) for path in PARAMETER_IDS},
            } | dict(frames(number))
        happened = list(opening() if start is None else start) if number == 0 else []
        happened += [xray(number)] if number in (20, 60) else []
        happened += (events or {}).get(number, ())
        if not isfinite(values["loss"]) and values["backwards"] and not any(event.data.get("what") == "loss" for event in happened):
            happened.append(Event("nonfinite", number, {"what": "loss", "where": "loss", "num_elements": 1}))
        built = {kind: frame(kind, number, rows) for kind, rows in tables.items() if rows}
        steps.append(Step(number, rank, values, built, tuple(happened), SITES))
    return steps


def loader(**about: Any) -> Event:
    """A DataLoader is started."""
    facts = {"num_workers": 0, "order": "sequential", "num_batches": 20, "dataset": "Digits"} | about
    return Event("source", 0, {"call": "loader", "line": "train.py:15", "text": "for x, y in loader:", **facts})


def some_labels(counts: Mapping[int, int], *, num_classes: int = 10, in_order: bool = False) -> dict[str, Any]:
    pairs = sorted([value, times] for value, times in counts.items())
    return {"num": sum(counts.values()), "num_classes": num_classes, "num_distinct": len(pairs), "counts": pairs, "in_order": in_order}


def mixed(step: int) -> dict[str, Any]:
    """A shuffled batch of 32."""
    return some_labels({value: 3 + (value + step) % 2 for value in range(9)})


def fed(
    steps: Sequence[Step],
    content: Callable[[int], tuple[float, float]] | None = lambda step: (step, step),
    data: Callable[[int], Mapping[str, Any]] | None = None,
    labels: Callable[[int], Mapping[str, Any]] | None = mixed,
) -> list[Step]:
    """The same with what is noted of batches: `content` is a hash of the samples and of the labels."""
    result = []
    for step in steps:
        if step.scalar("observed"):
            if content is not None:
                usual = {"num": 640, "min": 0.0, "max": 0.0, "size": 32}
                rows = [[usual.get(name, each if name == "hash" else 0.5) for each in content(step.number)] for name in BATCH_FIELDS]
                batch = Frame(Kind.BATCH, step.number, np.array([900, 901], np.uint32), BATCH_FIELDS, np.array(rows))
                sites = {**step.sites, 900: Site(900, "input", "batch.0"), 901: Site(901, "input", "batch.1")}
                step = replace(step, frames={**step.frames, Kind.BATCH: batch}, sites=sites)
            about: dict[str, Any] = {"num_fetched": 1, "size": 32, "num_inputs": 1, "num_alike": 0, "sample": None}
            about |= dict(data(step.number)) if data else {}
            about["labels"] = labels(step.number) if labels else None
            step = replace(step, events=(*step.events, Event("data", step.number, about)))
        result.append(step)
    return result


def healthy(num_steps: int = 200) -> list[Step]:
    """A training that has what every rule needs."""
    about = {"order": "stream", "num_workers": 2, "knows_worker": True, "copied_generators": [], "seeded_alike": []}
    memory = Event("memory_limit", 0, {"num_bytes": 8 << 30, "by": "this machine"})
    return fed(training(num_steps, start=[*opening(), loader(**about), memory]))


def spread_over_run(steps: Sequence[Step], events: Sequence[Event]) -> list[Step]:
    """The same with each of these events in the first, a middle and the last step."""
    places = {steps[0].number, steps[len(steps) // 2].number, steps[-1].number}
    added = {number: tuple(replace(event, step=number) for event in events) for number in places}
    return [replace(step, events=(*step.events, *added.get(step.number, ()))) for step in steps]


def frame(kind: str, step: int, rows: Rows) -> Frame:
    ids = OUTPUT_IDS if kind in (Kind.ACTIVATION, Kind.ACTIVATION_GRADIENT) else PARAMETER_IDS
    sites = np.array([ids[path] for path in rows], dtype=np.uint32)
    values = np.array([[one[name] for one in rows.values()] for name in STATISTICS], dtype=np.float64)
    return Frame(kind, step, sites, STATISTICS, values)


def write_log(path: Path, steps: Sequence[Step], rank: int = 0, attempt: int = 0) -> None:
    """A log with these steps, as a training would write it. A step without scalars is one that the training did not complete."""
    names = list(dict.fromkeys(name for step in steps for name in step.scalars))
    scalars = {name: Site(1000 + number, "scalar", name) for number, name in enumerate(names)}
    sites = {site.id: site for step in steps for site in step.sites.values()}
    records = [f.header(), f.manifest_record({"rank": rank, "attempt": attempt}), *f.sites_records([*sites.values(), *scalars.values()])]
    for step in steps:
        records += [f.event_record(event.kind, event.step, 0, event.data) for event in step.events]
        for kind, each in step.frames.items():
            records.append(f.FramePlan(kind, each.fields, each.sites, exact=True).encode(step.number, 0, each.values.T))
        if step.scalars:
            ids = [scalars[name].id for name in step.scalars]
            plan = f.FramePlan(Kind.STEP, ("value",), ids, exact=True)
            records.append(plan.encode_column(step.number, 0, [float(value) for value in step.scalars.values()]))
    path.write_bytes(b"".join(records))


@contextmanager
def view_of(steps: Sequence[Step]) -> Iterator[RunView]:
    """The view of a run with these steps, read from a real log."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rank0-hand-001.sonde"
        write_log(path, steps)
        (view,) = newest_views(Run(path)).values()
        yield view


def ask(rule: Rule, steps: Sequence[Step]) -> Result:
    """The result of a rule. Its errors are raised."""
    with view_of(steps) as view:
        reason = rule.missing_need(view)
        result = NotEvaluated(reason) if reason else rule.check(view)
        return [result] if isinstance(result, Finding) else result


def the_finding(rule: Rule, steps: Sequence[Step]) -> Finding:
    """The one finding that the rule must have."""
    answer = ask(rule, steps)
    assert isinstance(answer, list), answer
    (finding,) = answer
    assert finding.rule == rule.name
    assert finding.cause
    assert finding.fix
    assert "\n" not in finding.cause
    assert not any(isinstance(value, float) and isnan(value) for key, value in finding.evidence.items() if key.startswith("num"))
    return finding


def why_not(rule: Rule, steps: Sequence[Step]) -> str:
    answer = ask(rule, steps)
    assert isinstance(answer, NotEvaluated), answer
    return answer.reason
