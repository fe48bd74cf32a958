"""A run as a trace for Perfetto, or any viewer of Chrome traces: its steps with their phases, its events and its curves.

A run stores how long each phase of a step took, not when it began: inside a step the phases are drawn in the usual order of a loop.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sonde.errors import SondeError
from sonde.events import Event, Kind
from sonde.export.chrome_trace_format import Times, Trace, Track, compressed
from sonde.formatting import number
from sonde.render.safe_write import write_new
from sonde.run_view import RunView
from sonde.runlog.run_reader import Run

# A validation is counted to the step that follows it. Phases that this version does not know come before the last two.
ORDER = ("validation", "checkpoint", "data", "transfer", "forward", "backward", "optimizer", "", "other", "sonde")
CURVES = ("loss", "grad_norm", "lr", "loss_scale")  # also names that start with one of these and a colon
MEMORY = ("_bytes", "_mb", "_gb", "memory", "rss")  # ends of the names of curves of memory
MAX_STEPS = 50_000  # of one process, the last ones: a viewer opens about a million events, and each step has about ten
MAX_EVENTS = 20_000
MAX_MS = 1e12  # of a phase: thirty years; what is longer is damage
MAX_ARGUMENT = 2_000  # characters of one field of an event


def export(run: Run, output: Path | None, *, replace: bool) -> list[Path]:
    """Write the trace of a run. Without a name it is `perfetto.json.gz` in the run's directory."""
    directory = run.path if run.path.is_dir() else run.path.parent
    target = output or directory / "perfetto.json.gz"
    write_new(target, compressed(trace_of_run(run), target), replace=replace)
    return [target]


def trace_of_run(run: Run) -> Trace:
    """Every process of the run, each on a clock of its own that starts with its first step."""
    trace = Trace({"run": run.name, "made by": "sonde export --to perfetto", "phases inside a step": "in usual order, not as timed"})
    several = len({process.attempt for process in run.processes}) > 1
    for process in run.processes:
        attempt = f", attempt {process.attempt + 1}" if several else ""
        pid = trace.process(f"rank {process.rank}{attempt}", labels=run.name)
        _add_process(trace, RunView(process), trace.track(pid, "steps"), trace.track(pid, "events"))
    if not any(process.last_step >= 0 for process in run.processes):
        raise SondeError(f"{run.path} has no complete step, so there is nothing to draw over time.")
    return trace


def _add_process(trace: Trace, view: RunView, track: Track, event_track: Track) -> None:
    steps, first = view.steps, view.last_step - MAX_STEPS + 1
    names = sorted((name for name in steps if name.endswith("_ms") and name != "step_ms"), key=_phase_order)
    phases = {name.removesuffix("_ms"): _durations(steps[name]) for name in names}
    step_ms = _durations(steps["step_ms"])
    durations_ms = np.where(step_ms > 0, step_ms, sum(phases.values()))
    times_us = np.concatenate([[0.0], 1e3 * np.cumsum(durations_ms)]).tolist()  # where each step begins, and the end of the last
    curves = {name: steps[name].tolist() for name in steps if name.partition(":")[0] in CURVES or name.endswith(MEMORY)}
    has_loss = steps.is_present("loss")
    begins: dict[int, float] = {}  # by step number
    for row in np.flatnonzero(view.step_numbers >= first).tolist():
        begins[view.step_number(row)] = times_us[row]
        # A loss that is NaN is non-finite; another scalar that is NaN was not measured.
        values = {name: curve[row] for name, curve in curves.items() if not math.isnan(curve[row]) or (name == "loss" and has_loss[row])}
        facts = {"step": view.step_number(row), **values, "observed": bool(steps["observed"][row] > 0)}
        times = Times(times_us[row], times_us[row + 1] - times_us[row])
        trace.span(track, f"step {view.step_number(row)}", times, facts, category="step")
        _add_phases(trace, track, times, {phase: float(durations[row]) for phase, durations in phases.items()})
        for name, value in values.items():
            trace.counter(track, name, times.start_us, value)
    if begins and min(begins) > 0 and first > 0:
        trace.instant(event_track, f"the {first:,} steps before this one are left out", begins[min(begins)])
    for frame in view.process.frames(Kind.LOG):
        if frame.step in begins and frame.fields:
            for site, value in zip(frame.sites.tolist(), frame.values[0].tolist()):
                if site in view.sites:
                    trace.counter(track, view.sites[site].path, begins[frame.step], value)
    for num, event in enumerate(view.process.events()):
        if num >= MAX_EVENTS:
            trace.instant(event_track, f"only the first {MAX_EVENTS:,} events are drawn", times_us[-1])
            break
        if event.kind == "end" or event.step >= first:
            at_us = times_us[-1] if event.kind == "end" else begins.get(event.step, times_us[-1])
            data = {name: str(each)[:MAX_ARGUMENT] + "…" if len(str(each)) > MAX_ARGUMENT else each for name, each in event.data.items()}
            trace.instant(event_track, _headline(event), at_us, {"step": event.step, **data}, category=event.kind)


def _add_phases(trace: Trace, track: Track, step: Times, phases: Mapping[str, float]) -> None:
    """Phases may be nested (an optimizer that calls a closure): what exceeds the step is cut, the duration is in the arguments."""
    now_us = step.start_us
    for phase, duration_ms in phases.items():
        duration_us = min(duration_ms * 1e3, step.end_us - now_us)
        if duration_us > 0:
            trace.span(track, phase.replace("_", " "), Times(now_us, duration_us), {"ms": duration_ms}, category="phase")
            now_us += duration_us


def _durations(column: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Milliseconds; 0 where nothing was measured, or nothing that is a time."""
    return np.where((column > 0) & (column < MAX_MS), column, 0.0)


def _phase_order(name: str) -> tuple[int, str]:
    phase = name.removesuffix("_ms")
    return (ORDER.index(phase), "") if phase in ORDER else (ORDER.index(""), phase)


def _headline(event: Event) -> str:
    """The kind of an event, with the field that distinguishes it from others of its kind."""
    for key in ("where", "line", "class", "module", "name", "how", "what"):
        fact = event.data.get(key)
        if isinstance(fact, (str, int, float)) and fact != "":
            return f"{event.kind}: {fact if isinstance(fact, str) else number(fact)}"
    return event.kind
