"""The doors of a model's modules: what stands in for their forwards while a step is measured, and what is known of each module."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import nn

from sonde.capture.call_site import is_library
from sonde.capture.instead import StandIn
from sonde.capture.torch_internals import is_compiled
from sonde.profiler.time_trace import Tape

_IDLE = Tape()


@dataclass(frozen=True, slots=True)
class Layer:
    """A module as the report names it."""

    path: str
    kind: str
    depth: int
    parameter_bytes: int  # with those of the modules inside
    source: str


class Door(StandIn):
    """Calls the real forward, between two readings."""

    __slots__ = ("forward", "layer", "module", "tape", "under")

    def __init__(self, layer: int, module: nn.Module) -> None:
        self.layer, self.module, self.forward = layer, weakref.ref(module), type(module).forward
        self.under: Any = None
        self.tape = _IDLE

    @property
    def __wrapped__(self) -> Any:
        """Who asks for the signature of a forward gets that of the real one."""
        return self.under if self.under is not None else self.forward.__get__(self.module())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tape = self.tape
        forward = self.under if self.under is not None else self.forward.__get__(self.module())
        if torch.compiler.is_compiling() or tape.thread != get_ident():
            return forward(*args, **kwargs)
        if tape.is_outside and tape.trains and not torch.is_grad_enabled():
            return forward(*args, **kwargs)  # validation between two steps
        if tape.around is not None and tape.is_outside:
            with tape.around(args, kwargs):
                return self._measured(tape, forward, args, kwargs)
        return self._measured(tape, forward, args, kwargs)

    def _measured(self, tape: Tape, forward: Any, args: Any, kwargs: Any) -> Any:
        try:
            call = tape.enter(self.layer)
        except Exception as error:  # ours must not become the model's
            tape.broke(error)
            return forward(*args, **kwargs)
        output = None
        try:
            output = forward(*args, **kwargs)
            return output
        finally:
            try:
                tape.leave(call, output)
            except Exception as error:
                tape.broke(error)


class Doors:
    """All modules of some models. Planned once; put in and taken out around each measured step."""

    def __init__(self, models: Mapping[str, nn.Module], *, eager: bool) -> None:
        """`models` by the prefix of their paths. With `eager` what is compiled runs uncompiled, and is looked into."""
        self.layers: list[Layer] = []
        self.hidden: list[str] = []  # paths whose inside cannot be seen
        self._doors: list[Door] = []
        seen: set[int] = set()
        for prefix, model in models.items():
            for path, module, depth in _modules(model, prefix, 0, eager, self.hidden, seen):
                self._doors.append(Door(len(self.layers), module))
                size = sum(p.numel() * p.element_size() for p in module.parameters() if not nn.parameter.is_lazy(p))
                self.layers.append(Layer(path, type(module).__name__, depth, size, _source(module)))
        self._roots = [door for door in self._doors if self.layers[door.layer].depth == 0]

    def keep_roots(self, layers: Iterable[int]) -> None:
        """Which modules are called from outside is known once that has happened."""
        known = set(layers)
        self._roots = [door for door in self._doors if door.layer in known]

    @contextmanager
    def open(self, tape: Tape, *, roots_alone: bool) -> Iterator[None]:
        self.put_in(tape, roots_alone=roots_alone)
        try:
            yield
        finally:
            self.take_out()

    def put_in(self, tape: Tape, *, roots_alone: bool) -> None:
        for door in self._roots if roots_alone else self._doors:
            module = door.module()
            if module is not None:
                door.tape = tape
                door.put_in(module.__dict__)

    def take_out(self) -> None:
        for door in self._doors:
            module = door.module()
            if module is not None and door.tape is not _IDLE:
                door.tape = _IDLE
                door.take_out(module.__dict__)


def _modules(
    module: nn.Module, path: str, depth: int, eager: bool, hidden: list[str], seen: set[int]
) -> Iterator[tuple[str, nn.Module, int]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    if eager and hasattr(module, "_orig_mod"):
        yield from _modules(module._orig_mod, path, depth, eager, hidden, seen)  # type: ignore[arg-type]
        return
    if isinstance(module, torch.jit.ScriptModule):
        hidden.append(path)  # runs outside of Python, and takes no stand-in
        return
    yield path, module, depth
    if isinstance(module, nn.DataParallel) or (not eager and is_compiled(module)):
        hidden.append(path)
        return
    for name, child in module._modules.items():
        if child is not None:
            yield from _modules(child, f"{path}.{name}" if path else name, depth + 1, eager, hidden, seen)


def _source(module: nn.Module) -> str:
    code = getattr(type(module).forward, "__code__", None)
    if code is None or is_library(code.co_filename):
        return ""
    return f"{code.co_filename.replace(chr(92), '/').rpartition('/')[2]}:{code.co_firstlineno}"
