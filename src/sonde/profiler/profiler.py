"""The Profiler: timers for sections of the user's code, and profiles of whole models, layer by layer, forward and backward."""

import math
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Self

import torch
from torch import nn

from sonde.errors import SondeError, require_function
from sonde.formatting import listing
from sonde.profiler import LayerCost, ProfileReport, Section, Span, TimeSpread
from sonde.profiler.profile_model import Loss, profile_model
from sonde.profiler.run_forward_pass import forward_arguments
from sonde.runlog.run_reader import Run

MAX_DURATIONS = 1000  # of a section or recorded layer, the latest: for the percentiles. Calls and total include all
MAX_SPANS = 5000  # of sections, for a trace file


@dataclass(slots=True)
class _SectionTimes:
    calls: int = 0
    total_ms: float = 0.0
    last_ms: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_DURATIONS))


@dataclass(slots=True)
class _RecordedLayer:
    kind: str
    calls: int = 0
    forward_ms: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_DURATIONS))
    backward_ms: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_DURATIONS))
    total_ms: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_DURATIONS))
    memory: int = 0
    parameters: int = 0


class Profiler:
    """Times named sections of your code and the layers of a model; `report()` returns both. A timer of one name may run in several threads
    at once, once in each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, dict[str, tuple[str, int]]] = {}  # by thread, then by name: enclosing section, start; the innermost last
        self._sections: dict[tuple[str, str], _SectionTimes] = {}  # by name and enclosing section
        self._spans: list[tuple[str, int, int, int]] = []  # name, start, end, thread
        self._layers: dict[str, _RecordedLayer] = {}
        self._profile: ProfileReport | None = None

    @classmethod
    def from_run(cls, run: Run | Path | str) -> Self:
        """The times of a run: phases of its steps, and layers of the steps that were measured in detail."""
        from sonde.profiler.profile_of_run import profile_of_run

        profiler = cls()
        profiler._profile = profile_of_run(run)
        return profiler

    def start(self, name: str) -> None:
        """Start a timer. Timers that start while it runs are nested in it."""
        if not isinstance(name, str) or not name:
            raise SondeError(f"a timer needs a name, for instance profiler.start('load'), not {name!r}.")
        running = self._running.setdefault(threading.get_ident(), {})
        if name in running:
            raise SondeError(f"the timer {name!r} is running already. Stop it first with stop({name!r}), or give this one another name.")
        running[name] = next(reversed(running), ""), perf_counter_ns()

    def stop(self, name: str) -> float:
        """Stop a timer. Returns the seconds since its start."""
        end = perf_counter_ns()
        running = self._running.get(threading.get_ident(), {})
        if not isinstance(name, str):
            raise SondeError(f"a timer has a name, for instance profiler.stop('load'), not {name!r}.")
        if name not in running:
            others = f"Running in this thread: {listing(list(running))}." if running else "No timer runs in this thread."
            raise SondeError(f"the timer {name!r} was not started, or was stopped already. {others}\nStart it with start({name!r}).")
        parent, start = running.pop(name)
        with self._lock:
            times = self._sections.setdefault((name, parent), _SectionTimes())
            times.calls += 1
            times.total_ms += (end - start) / 1e6
            times.last_ms.append((end - start) / 1e6)
            if len(self._spans) < MAX_SPANS:
                self._spans.append((name, start, end, threading.get_ident()))
        return (end - start) / 1e9

    start_timer, end_timer = start, stop

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time a block; sections may be nested."""
        self.start(name)
        try:
            yield
        finally:
            if name in self._running.get(threading.get_ident(), ()):  # else the block stopped it itself
                self.stop(name)

    def record_layer_execution(
        self, name: str, kind: str, forward_time: float, backward_time: float | None = None, memory: int = 0, parameters: int = 0
    ) -> None:
        """Add one execution of a layer that you timed yourself. Times are seconds; `memory` and `parameters` are bytes."""
        if not isinstance(name, str) or not isinstance(kind, str):
            raise SondeError(f'name and kind of a layer are strings, for instance "encoder.0", "Linear"; not {name!r}, {kind!r}.')
        for argument, value in (("forward_time", forward_time), ("backward_time", backward_time)):
            is_given = value is not None or argument == "forward_time"
            if is_given and (isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0):
                raise SondeError(f"{argument} of {name!r} must be seconds, 0 or more, not {value!r}.")
        for argument, value in (("memory", memory), ("parameters", parameters)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise SondeError(f"{argument} of {name!r} must be a number of bytes, 0 or more, not {value!r}.")
        layer = self._layers.setdefault(name, _RecordedLayer(kind))
        layer.kind, layer.memory, layer.parameters = kind, max(layer.memory, int(memory)), int(parameters)
        layer.calls += 1
        layer.forward_ms.append(forward_time * 1e3)
        layer.total_ms.append((forward_time + (backward_time or 0.0)) * 1e3)
        if backward_time is not None:
            layer.backward_ms.append(backward_time * 1e3)

    def profile(
        self, model: nn.Module, inputs: Any, *, loss: Loss | None = None, optimizer: torch.optim.Optimizer | None = None, warmup: int = 3,
        repeats: int = 10, backward: bool = True,
    ) -> ProfileReport:  # fmt: skip
        """Run steps of this model and measure every layer, forward and backward. Model, optimizer and random state are restored.

        `inputs` are the arguments of forward: a tensor, a tuple of arguments, or a dict of keyword arguments. `loss` maps the output to one
        number; without it the backward starts at the output's own `.loss`, or at the sum of the outputs. `optimizer`: its update becomes
        part of the step. `warmup` steps are not measured; `repeats` is the number of bare and of timed steps. `backward=False` times
        inference: only the forward, without gradients. The model runs in its current mode, train or eval.
        """
        if not isinstance(model, nn.Module):
            raise SondeError(f"profile takes a torch.nn.Module, not a {type(model).__name__}. To time other code use section(name).")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise SondeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}.")
        if any(nn.parameter.is_lazy(p) for p in model.parameters()):
            raise SondeError("this model has uninitialized parameters (Lazy modules). Run it once on an input, then profile it.")
        if loss is not None:
            require_function(loss, "loss", "lambda output: cross_entropy(output, targets)")
        for argument, value, minimum in (("warmup", warmup, 0), ("repeats", repeats, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise SondeError(f"{argument} must be a whole number, {minimum} or more, not {value!r}.")
        if isinstance(inputs, list) and len(inputs) != 1:
            raise SondeError(f"profile takes one batch, not a list of {len(inputs)}: all steps must be equal to be compared.")
        ((args, kwargs),) = forward_arguments(inputs)
        self._profile, _ = profile_model(
            model, args, kwargs, loss=loss, optimizer=optimizer if backward else None, warmup=warmup, repeats=repeats, backward=backward
        )
        return self.report()

    def report(self) -> ProfileReport:
        """Everything measured so far: the layers of the last profiled model, recorded layers, sections."""
        with self._lock:
            sections = tuple(
                Section(name, times.calls, times.total_ms, TimeSpread.of(list(times.last_ms)), parent)
                for (name, parent), times in self._sections.items()
            )
            spans = list(self._spans)
        running = list(dict.fromkeys(name for timers in list(self._running.values()) for name in list(timers)))
        if self._profile is None and not sections and not self._layers:
            if running:
                raise SondeError(
                    f"nothing was measured to its end: the timer{'s' if len(running) > 1 else ''} {listing(running)} "
                    f"still run{'' if len(running) > 1 else 's'}.\nCall stop({running[-1]!r}) before report()."
                )
            raise SondeError(
                "nothing was measured yet. Time a model with profiler.profile(model, inputs), or your own code with:\n"
                '    with profiler.section("load"): ...'
            )
        base = self._profile or ProfileReport(title="sections")
        recorded = tuple(_recorded_cost(name, layer) for name, layer in self._layers.items())
        notes = list(base.notes)
        if running:
            notes.append(f"still running and not in this report: {listing(running)}")
        if not base.layers and not recorded:
            notes.append("timers measure sections alone. The layers, with share, backward and memory: profiler.profile(model, inputs)")
        return replace(
            base, layers=(*base.layers, *recorded), sections=sections, spans=(*base.spans, *_section_spans(spans)), notes=tuple(notes)
        )

    def clear(self) -> None:
        """Discard all measurements; running timers continue."""
        with self._lock:
            self._sections.clear()
            self._spans.clear()
            self._layers.clear()
            self._profile = None


def _recorded_cost(name: str, layer: _RecordedLayer) -> LayerCost:
    forward, backward, latency = (TimeSpread.of(list(times)) for times in (layer.forward_ms, layer.backward_ms, layer.total_ms))
    return LayerCost(
        name, layer.kind, depth=name.count(".") + 1 if name else 0, calls=float(layer.calls), forward=forward, backward=backward,
        forward_self=forward, backward_self=backward, memory_bytes=layer.memory, memory_self_bytes=layer.memory,
        parameter_bytes=layer.parameters, latency=latency, is_recorded=True,
    )  # fmt: skip


def _section_spans(spans: list[tuple[str, int, int, int]]) -> Iterator[Span]:
    zero = min((start for _, start, _, _ in spans), default=0)
    threads = {thread: number for number, thread in enumerate(dict.fromkeys(thread for *_, thread in spans))}
    for name, start, end, thread in sorted(spans, key=lambda span: (span[1], -span[2])):
        yield Span(0, "section", name, (start - zero) / 1e6, max(0.0, (end - start) / 1e6), threads[thread])
