"""The torch hooks of `Hooks`: on selected layers, on their outputs for the gradients, and around the optimizer's step.

They change no value, keep no model alive, are not copied with the model, and raise nothing except `TrainingStopped` between updates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from sonde.capture.hook_not_copied_with_module import UncopiedHook
from sonde.capture.training_callback_interface import TrainingCallbacks
from sonde.capture.watched_model import WatchedModel
from sonde.statistics.find_tensors import find_tensors
from sonde.statistics.private_torch_api import graph_task_id
from sonde.tools.safe_hook import SafeHook


class HookSubscriber(Protocol):
    """Receives the tensors of module hooks."""

    def is_due(self, layer: str, *, is_forward: bool) -> bool: ...
    def on_tensor(self, layer: str, item: str, tensor: torch.Tensor, *, is_forward: bool, step: int) -> None: ...
    @property
    def current_step(self) -> int: ...


class ModuleHook:
    """The forward hook on one layer, with gradient hooks on its outputs."""

    __slots__ = ("_gradient_hook", "_handle", "_output_hook", "layer", "num_calls", "subscriber")

    def __init__(self, layer: str, module: nn.Module, subscriber: HookSubscriber) -> None:
        self.layer, self.subscriber = layer, subscriber
        self.num_calls = 0
        self._output_hook = SafeHook(f"the output of {layer}", self._on_output)
        self._gradient_hook = SafeHook(f"the gradient of {layer}", self._on_gradient)
        self._handle = module.register_forward_hook(self._output_hook)

    def _on_output(self, module: nn.Module, args: Any, output: Any) -> None:
        self.num_calls += 1
        subscriber = self.subscriber
        # With activation checkpointing a layer runs again during backward. That is not a second forward, but re-entrant
        # checkpointing builds the graph there, so gradient hooks are still needed.
        on_forward = not in_backward() and subscriber.is_due(self.layer, is_forward=True)
        on_backward = torch.is_grad_enabled() and subscriber.is_due(self.layer, is_forward=False)
        if not (on_forward or on_backward):
            return
        step = subscriber.current_step
        for item, tensor in [("", output)] if isinstance(output, torch.Tensor) else find_tensors(output):
            if on_forward:
                subscriber.on_tensor(self.layer, item, tensor, is_forward=True, step=step)
            if on_backward and tensor.requires_grad:
                tensor.register_hook(partial(self._gradient_hook, item, step))  # type: ignore[no-untyped-call]

    def _on_gradient(self, item: str, step: int, gradient: torch.Tensor) -> None:
        self.subscriber.on_tensor(self.layer, item, gradient, is_forward=False, step=step)

    def remove(self) -> None:
        """Removes the hook; gradient hooks on outputs that are still alive do nothing from now on."""
        self._output_hook.is_disabled = self._gradient_hook.is_disabled = True
        self._handle.remove()


class NotifyHook(UncopiedHook):
    """A torch hook on a model or an optimizer that calls a function without arguments."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._callback()


def in_backward() -> bool:
    """True if this thread runs a backward pass."""
    return graph_task_id() != -1


class ModelLayers:
    """The layers of a model by name: all modules, the leaves, and the modules that hooks cannot observe (compiled or scripted)."""

    def __init__(self, model: nn.Module) -> None:
        watched = WatchedModel("", model, TrainingCallbacks())
        body = watched.body
        assert body is not None  # the caller holds a reference
        self.unobservable = list(watched.unmeasured_parts())
        hidden = tuple(f"{path}." if path else "" for path, _ in self.unobservable)
        root = type(body).__name__  # the model itself has no name
        self.modules: dict[str, nn.Module] = {}
        self.hidden: set[str] = set()  # names inside of unobservable modules
        for path, module in body.named_modules(remove_duplicate=False):
            self.modules[path or root] = module
            if hidden and f"{path}.".startswith(hidden):
                self.hidden.add(path or root)
        self.leaves = [path or root for path, _ in watched.leaves()]
