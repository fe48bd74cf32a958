"""A run as a trace for Perfetto, or any viewer of Chrome traces: its steps with their phases, what happened, and its curves.

A run holds how long each phase of a step took, not when it began: inside a step the phases are drawn in the order in which loops have them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sonde.errors import SondeError
from sonde.events import Event, Kind, Step
from sonde.export.trace import Times, Trace, Track, compressed
from sonde.formatting import number
from sonde.render.safe_write import write_new
from sonde.runlog.reader import Run, RunProcess

# A validation is counted to the step that follows it. Then the order of the loop, then what this version does not know, then the rest.
ORDER = ("validation", "checkpoint", "data", "transfer", "forward", "backward", "optimizer")
LAST = ("other", "sonde")
CURVES = ("loss", "grad_norm", "lr", "loss_scale")  # and what starts with one of them and a colon, and whatever measures memory
MEMORY = ("_bytes", "_mb", "_gb", "memory", "rss")
MAX_STEPS = 50_000  # of one process, the last ones: a viewer takes a million events, and each step has about ten
MAX_EVENTS = 20_000
MAX_ARGUMENT = 2_000  # characters of one piece of an event


def export(run: Run, output: Path | None, *, replace: bool) -> list[Path]:
    """Write the trace of a run. Without a name it is `perfetto.json.gz` in the run's directory."""
    beside = run.path if run.path.is_dir() else run.path.parent
    target = output or beside / "perfetto.json.gz"
    write_new(target, compressed(trace_of_run(run), target), replace=replace)
    return [target]


def trace_of_run(run: Run) -> Trace:
    """Every process of the run, each on a clock of its own that starts with its first step."""
    trace = Trace({"run": run.name, "made by": "sonde export --to perfetto", "phases inside a step": "in usual order, not as timed"})
    several = len({process.attempt for process in run.processes}) > 1
    for process in run.processes:
        attempt = f", attempt {process.attempt + 1}" if several else ""
        pid = trace.process(f"rank {process.rank}{attempt}", labels=run.name)
        _add_process(trace, process, trace.track(pid, "steps"), trace.track(pid, "events"))
    if not any(process.last_step >= 0 for process in run.processes):
        raise SondeError(f"{run.path} has no complete step, so there is nothing to draw over time.")
    return trace


def _add_process(trace: Trace, process: RunProcess, steps: Track, events: Track) -> None:
    first = process.last_step - MAX_STEPS + 1
    begins: dict[int, float] = {}  # step: when it began
    now_us = 0.0
    for step in process.steps():
        length_us = _length_us(step.scalars)
        if step.number >= first:
            begins[step.number] = now_us
            _add_step(trace, step, steps, Times(now_us, length_us))
        now_us += length_us
    if begins and min(begins) > 0 and first > 0:
        trace.instant(events, f"the {first:,} steps before this one are left out", begins[min(begins)])
    for frame in process.frames(Kind.LOG):
        if frame.step in begins and frame.fields:
            for site, value in zip(frame.sites.tolist(), frame.values[0].tolist()):
                if site in process.sites:
                    trace.counter(steps, process.sites[site].path, begins[frame.step], value)
    for num, event in enumerate(process.events()):
        if num >= MAX_EVENTS:
            trace.instant(events, f"only the first {MAX_EVENTS:,} events are drawn", now_us)
            break
        if event.kind != "end" and event.step < first:
            continue
        at_us = now_us if event.kind == "end" else begins.get(event.step, now_us)
        trace.instant(events, _headline(event), at_us, _bounded({"step": event.step, **event.data}), category=event.kind)


def _add_step(trace: Trace, step: Step, track: Track, times: Times) -> None:
    # Of the loss, NaN says that it is bad; of the others, that there was none.
    curves = {name: value for name, value in _curves(step.scalars) if name == "loss" or not math.isnan(value)}
    facts = {"step": step.number, **curves, "observed": bool(step.scalar("observed", 0.0))}
    trace.span(track, f"step {step.number}", times, facts, category="step")
    now_us = times.start_us
    for phase, length_ms in _phases(step.scalars):
        # Phases may lie inside each other (an optimizer that calls a closure): what does not fit is cut, its length is in the facts.
        length_us = min(length_ms * 1e3, times.end_us - now_us)
        if length_us > 0:
            trace.span(track, phase.replace("_", " "), Times(now_us, length_us), {"ms": length_ms}, category="phase")
            now_us += length_us
    for name, value in curves.items():
        trace.counter(track, name, times.start_us, value)


def _length_us(scalars: Mapping[str, float]) -> float:
    length_ms = scalars.get("step_ms", math.nan)
    if not math.isfinite(length_ms) or length_ms <= 0:
        length_ms = sum(ms for _, ms in _phases(scalars))
    return length_ms * 1e3


def _phases(scalars: Mapping[str, float]) -> list[tuple[str, float]]:
    """The phases of a step, as loops have them, those that took time."""
    lengths = {name.removesuffix("_ms"): value for name, value in scalars.items() if name.endswith("_ms") and name != "step_ms"}

    def place(phase: str) -> tuple[int, str]:
        if phase in ORDER:
            return ORDER.index(phase), ""
        return (100 + LAST.index(phase), "") if phase in LAST else (50, phase)

    return [(phase, lengths[phase]) for phase in sorted(lengths, key=place) if 0 < lengths[phase] < math.inf]


def _curves(scalars: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    for name, value in scalars.items():
        if name.partition(":")[0] in CURVES or any(name.endswith(end) for end in MEMORY):
            yield name, value


def _headline(event: Event) -> str:
    """The kind of an event, with the one fact that tells it from its like."""
    for key in ("where", "line", "class", "module", "name", "how", "what"):
        fact = event.data.get(key)
        if isinstance(fact, (str, int, float)) and fact != "":
            return f"{event.kind}: {fact if isinstance(fact, str) else number(fact)}"
    return event.kind


def _bounded(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if len(str(value)) <= MAX_ARGUMENT else str(value)[:MAX_ARGUMENT] + "…" for name, value in data.items()}
