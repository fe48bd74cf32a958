"""Where the time of a step goes: sections by hand, and whole models layer by layer, forward and backward."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn

from sonde.errors import SondeError
from sonde.profiler import LayerCost, ProfileReport, Section, Span, Spread
from sonde.profiler.run_model import Loss, measure_alone
from sonde.rules.words import listing
from sonde.tools.forward_pass import forward_arguments

KEPT = 1000  # durations of a section, for its spread; all are counted
MAX_SPANS = 5000  # of sections, for a trace


@dataclass(slots=True)
class _Kept:
    calls: int = 0
    total_ms: float = 0.0
    last_ms: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))


@dataclass(slots=True)
class _Running:
    name: str
    parent: str
    began: int


@dataclass(slots=True)
class _Layer:
    kind: str
    forward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)
    memory: int = 0
    parameters: int = 0


class Profiler:
    """Times what you name, and what a model does. `report()` has all of it; sections are times of your own code.

    Timers of one name may run in several threads at once, once in each.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, list[_Running]] = {}  # by thread, the innermost last
        self._sections: dict[tuple[str, str], _Kept] = {}  # by name and the section around it
        self._spans: list[tuple[str, int, int, int]] = []  # name, began, ended, thread
        self._layers: dict[str, _Layer] = {}
        self._profile: ProfileReport | None = None

    # -- by hand -----------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start a timer. What starts while it runs lies inside it."""
        if not isinstance(name, str) or not name:
            raise SondeError(f"a timer needs a name, for instance profiler.start('load'); this is {name!r}.")
        running = self._running.setdefault(threading.get_ident(), [])
        if any(one.name == name for one in running):
            raise SondeError(f"the timer {name!r} is running already. Stop it first with stop({name!r}), or give this one another name.")
        running.append(_Running(name, running[-1].name if running else "", perf_counter_ns()))

    def stop(self, name: str) -> float:
        """Stop a timer; answers with the seconds since its start."""
        ended = perf_counter_ns()
        running = self._running.get(threading.get_ident(), [])
        found = next((one for one in reversed(running) if one.name == name), None)
        if found is None:
            others = f"Running in this thread: {listing([one.name for one in running])}." if running else "No timer runs in this thread."
            raise SondeError(f"the timer {name!r} was not started, or was stopped already. {others}\nStart it with start({name!r}).")
        running.remove(found)
        took = ended - found.began
        with self._lock:
            kept = self._sections.setdefault((name, found.parent), _Kept())
            kept.calls += 1
            kept.total_ms += took / 1e6
            kept.last_ms.append(took / 1e6)
            if len(self._spans) < MAX_SPANS:
                self._spans.append((name, found.began, ended, threading.get_ident()))
        return took / 1e9

    def start_timer(self, name: str) -> None:
        """The same as `start`."""
        self.start(name)

    def end_timer(self, name: str) -> float:
        """The same as `stop`: seconds."""
        return self.stop(name)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time a block; sections may lie inside each other."""
        self.start(name)
        try:
            yield
        finally:
            running = self._running.get(threading.get_ident(), [])
            if any(one.name == name for one in running):  # else it was stopped by name inside, which is nobody's harm
                self.stop(name)

    def record_layer_execution(
        self,
        name: str,
        kind: str,
        forward_time: float,
        backward_time: float | None = None,
        *,
        memory: int = 0,
        parameters: int = 0,
    ) -> None:
        """Add one execution of a layer that you timed yourself: seconds, and bytes of memory and of parameters."""
        for what, value in (("forward_time", forward_time), ("backward_time", backward_time)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0):
                raise SondeError(f"{what} of {name!r} must be seconds, 0 or more, not {value!r}.")
        layer = self._layers.setdefault(name, _Layer(kind))
        layer.kind, layer.memory, layer.parameters = kind, max(layer.memory, int(memory)), int(parameters)
        layer.forward_ms.append(forward_time * 1e3)
        if backward_time is not None:
            layer.backward_ms.append(backward_time * 1e3)

    # -- a model -----------------------------------------------------------------------------------

    def profile(
        self,
        model: nn.Module,
        inputs: Any,
        *,
        loss: Loss | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        warmup: int = 3,
        repeats: int = 10,
        backward: bool = True,
    ) -> ProfileReport:
        """Run steps of this model and measure every layer, forward and backward. Model, optimizer and random state are then as before.

        `inputs` is what forward takes: a tensor, a tuple of arguments, or a dict of keyword arguments. `loss` is a function of the output;
        without it the output's own `.loss`, or else the sum of the outputs, is differentiated. With `optimizer` its step is part of the
        step. `backward=False` times inference: the forward alone, without gradients. The model runs in the mode that it is in, train
        or eval.
        """
        if not isinstance(model, nn.Module):
            raise SondeError(f"profile takes a torch.nn.Module, not a {type(model).__name__}. For a piece of code use section(name).")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise SondeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}.")
        if any(nn.parameter.is_lazy(p) for p in model.parameters()):
            raise SondeError("this model has parameters without a shape yet (Lazy modules). Run it once on an input, then profile it.")
        for what, value, least in (("warmup", warmup, 0), ("repeats", repeats, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SondeError(f"{what} must be a whole number, {least} or more, not {value!r}.")
        given = list(forward_arguments(inputs))
        if len(given) != 1:
            raise SondeError(f"profile takes one batch, not a list of {len(given)}: all steps must do the same to be compared.")
        (args, kwargs), = given  # fmt: skip
        self._profile, _ = measure_alone(
            model, args, kwargs, loss=loss, optimizer=optimizer if backward else None, warmup=warmup, repeats=repeats, backward=backward
        )
        return self.report()

    def report(self) -> ProfileReport:
        """Everything measured so far: the last profiled model, recorded layers, sections."""
        with self._lock:
            sections = tuple(
                Section(name, kept.calls, kept.total_ms, Spread.of(list(kept.last_ms)), parent)
                for (name, parent), kept in self._sections.items()
            )
            spans = list(self._spans)
        if self._profile is None and not sections and not self._layers:
            raise SondeError(
                "nothing was measured yet. Time a model with profiler.profile(model, inputs), or your own code with:\n"
                '    with profiler.section("load"): ...'
            )
        base = self._profile or ProfileReport(title="sections")
        recorded = tuple(_recorded(name, layer) for name, layer in self._layers.items())
        return replace(base, layers=(*base.layers, *recorded), sections=sections, spans=(*base.spans, *_section_spans(spans)))

    def clear(self) -> None:
        """Forget everything measured; timers that run go on."""
        with self._lock:
            self._sections.clear()
            self._spans.clear()
            self._layers.clear()
            self._profile = None


def _recorded(name: str, layer: _Layer) -> LayerCost:
    forward, backward = Spread.of(layer.forward_ms), Spread.of(layer.backward_ms)
    return LayerCost(
        name, layer.kind, depth=name.count(".") + 1 if name else 0, calls=float(len(layer.forward_ms)), forward=forward, backward=backward,
        forward_self=forward, backward_self=backward, memory_bytes=layer.memory, memory_self_bytes=layer.memory,
        parameter_bytes=layer.parameters,
    )  # fmt: skip


def _section_spans(spans: list[tuple[str, int, int, int]]) -> Iterator[Span]:
    zero = min((began for _, began, _, _ in spans), default=0)
    threads = {thread: number for number, thread in enumerate(dict.fromkeys(thread for *_, thread in spans))}
    for name, began, ended, thread in sorted(spans, key=lambda span: (span[1], -span[2])):
        yield Span(0, "section", name, (began - zero) / 1e6, max(0.0, (ended - began) / 1e6), threads[thread])
