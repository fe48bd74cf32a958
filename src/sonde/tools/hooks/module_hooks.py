"""The torch hooks behind Sonde's: on the layers that somebody selected, on their outputs for the gradients, around the optimizer's step.

None of them changes what flows, raises (but for `TrainingStopped`, between updates), travels with a copy of the model, or keeps it alive.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from sonde.capture.inert_copy import InertCopy
from sonde.capture.patches import TrainingCallbacks
from sonde.capture.watched_model import WatchedModel
from sonde.statistics.tensor_utils import find_tensors
from sonde.tools.safe_hook import Contained


class Listener(Protocol):
    """Whom taps tell."""

    def wants(self, layer: str, *, is_forward: bool) -> bool: ...
    def passed(self, layer: str, item: str, tensor: torch.Tensor, *, is_forward: bool, step: int) -> None: ...
    @property
    def current_step(self) -> int: ...


class Tap:
    """Stands on one layer."""

    __slots__ = ("_handle", "_on_gradient", "_on_output", "layer", "listener", "num_calls")

    def __init__(self, layer: str, module: nn.Module, listener: Listener) -> None:
        self.layer, self.listener = layer, listener
        self.num_calls = 0
        self._on_output = Contained(f"the output of {layer}", self._output)
        self._on_gradient = Contained(f"the gradient of {layer}", self._gradient)
        self._handle = module.register_forward_hook(self._on_output)

    def _output(self, module: nn.Module, args: Any, output: Any) -> None:
        self.num_calls += 1
        listener = self.listener
        # In a backward pass a layer runs again where checkpointing forgot its output: that is no other forward, but with
        # re-entrant checkpointing it is where the graph is made.
        on_forward = not in_backward() and listener.wants(self.layer, is_forward=True)
        on_backward = torch.is_grad_enabled() and listener.wants(self.layer, is_forward=False)
        if not (on_forward or on_backward):
            return
        step = listener.current_step
        for item, tensor in [("", output)] if isinstance(output, torch.Tensor) else find_tensors(output):
            if on_forward:
                listener.passed(self.layer, item, tensor, is_forward=True, step=step)
            if on_backward and tensor.requires_grad:
                tensor.register_hook(partial(self._on_gradient, item, step))  # type: ignore[no-untyped-call]

    def _gradient(self, item: str, step: int, gradient: torch.Tensor) -> None:
        self.listener.passed(self.layer, item, gradient, is_forward=False, step=step)

    def remove(self) -> None:
        """Outputs that still wait for their gradients wait in vain."""
        self._on_output.retired = self._on_gradient.retired = True
        self._handle.remove()


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
        watched = WatchedModel("", model, TrainingCallbacks())
        body = watched.body
        assert body is not None  # the caller holds it
        self.unseen = list(watched.unmeasured_parts())
        hidden = tuple(f"{path}." if path else "" for path, _ in self.unseen)
        root = type(body).__name__  # the model itself has no path
        self.modules: dict[str, nn.Module] = {}
        self.hidden: set[str] = set()  # of these names, those inside of what is out of sight
        for path, module in body.named_modules(remove_duplicate=False):
            self.modules[path or root] = module
            if hidden and f"{path}.".startswith(hidden):
                self.hidden.add(path or root)
        self.leaves = [path or root for path, _ in watched.leaves()]
