"""The torch hooks behind Sonde's: on the layers that somebody selected, on their outputs for the gradients, around the optimizer's step.

None of them changes what flows, raises (but for `TrainingStopped`, between updates), travels with a copy of the model, or keeps it alive.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from sonde.capture import kernel
from sonde.capture.tensors import tensors_in
from sonde.capture.watched import InertCopy, Watched

_log = logging.getLogger("sonde")


class Listener(Protocol):
    """Whom taps tell."""

    def wants(self, layer: str, *, is_forward: bool) -> bool: ...
    def passed(self, layer: str, item: str, tensor: torch.Tensor, *, is_forward: bool, step: int) -> None: ...
    @property
    def current_step(self) -> int: ...


class Tap(InertCopy):
    """Stands on one layer."""

    __slots__ = ("handle", "is_live", "layer", "listener", "num_calls")

    def __init__(self, layer: str, module: nn.Module, listener: Listener) -> None:
        self.layer, self.listener = layer, listener
        self.is_live, self.num_calls = True, 0
        self.handle = module.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or not self.is_live:
            return
        self.num_calls += 1
        try:
            self._look(output)
        except Exception as error:
            self._retire(error)

    def _look(self, output: Any) -> None:
        listener = self.listener
        # In a backward pass a layer runs again where checkpointing forgot its output: that is no other forward, but with
        # re-entrant checkpointing it is where the graph is made.
        on_forward = not in_backward() and listener.wants(self.layer, is_forward=True)
        on_backward = torch.is_grad_enabled() and listener.wants(self.layer, is_forward=False)
        if not (on_forward or on_backward):
            return
        step = listener.current_step
        alone = isinstance(output, torch.Tensor)
        for place, tensor in tensors_in(output):
            item = "" if alone else place
            if on_forward:
                listener.passed(self.layer, item, tensor, is_forward=True, step=step)
            if on_backward and tensor.requires_grad and kernel.supported(tensor) is None:
                tensor.register_hook(_OnGradient(self, item, step))  # type: ignore[no-untyped-call]

    def _retire(self, error: Exception) -> None:
        self.is_live = False
        _log.warning("sonde: hooks at %s failed (%s: %s) and were taken off. Training goes on.", self.layer, type(error).__name__, error)

    def remove(self) -> None:
        """Outputs that still wait for their gradients wait in vain."""
        self.is_live = False
        self.handle.remove()


class _OnGradient:
    """Waits on one output for its gradient."""

    __slots__ = ("item", "step", "tap")

    def __init__(self, tap: Tap, item: str, step: int) -> None:
        self.tap, self.item, self.step = tap, item, step

    def __call__(self, gradient: torch.Tensor) -> None:
        if torch.compiler.is_compiling() or not self.tap.is_live:
            return
        try:
            self.tap.listener.passed(self.tap.layer, self.item, gradient, is_forward=False, step=self.step)
        except Exception as error:
            self.tap._retire(error)


class Signal(InertCopy):
    """A torch hook on a model or an optimizer that only says that its moment has come."""

    __slots__ = ("tell",)

    def __init__(self, tell: Callable[[], None]) -> None:
        self.tell = tell

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.tell()


def in_backward() -> bool:
    """Whether autograd is at work in this thread."""
    return torch._C._current_graph_task_id() != -1


class Layers:
    """The layers of a model by name: those that can be hooked, those that are meant where nobody named any, and those out of sight."""

    def __init__(self, model: nn.Module) -> None:
        watched = Watched("", model, _nothing, _nothing)
        body = watched.body
        assert body is not None  # the caller holds it
        self.unseen = list(watched.hidden_parts())
        hidden = tuple(f"{path}." if path else "" for path, _ in self.unseen)
        root = type(body).__name__  # the model itself has no path
        self.modules: dict[str, nn.Module] = {}
        self.hidden: set[str] = set()  # of these names, those inside of what is out of sight
        for path, module in body.named_modules(remove_duplicate=False):
            self.modules[path or root] = module
            if hidden and f"{path}.".startswith(hidden):
                self.hidden.add(path or root)
        self.leaves = [path or root for path, _ in watched.leaves()]


def _nothing(*_: Any) -> None:
    """A `Watched` that is only asked for its layers tells nobody."""
