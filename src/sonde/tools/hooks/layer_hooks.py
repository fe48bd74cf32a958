"""The torch hooks of `Hooks`: on the selected layers of a model, on their outputs for the gradients, and around optimizer steps.

They change no value, keep no model alive, are not copied with the model, and raise nothing except `TrainingStopped` between updates.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sonde.capture.forward_call_patch import UncopiedHook
from sonde.capture.training_callback_interface import TrainingCallbacks
from sonde.capture.watched_model import WatchedModel
from sonde.capture.zero_grad_tracking import optimizer_parameters
from sonde.errors import SondeError
from sonde.formatting import listing
from sonde.statistics import reductions
from sonde.statistics.find_tensors import find_tensors, read_scalar
from sonde.statistics.private_torch_api import graph_task_id, unwrap_compiled
from sonde.tools.hooks.hook_actions import RegisteredHook
from sonde.tools.hooks.hook_builder import HookAction
from sonde.tools.safe_hook import SafeHook

if TYPE_CHECKING:
    from sonde.tools.hooks.hook_manager import Hooks


class ModuleHook:
    """The forward hook on one layer, with gradient hooks on its outputs."""

    __slots__ = ("_gradient_hook", "_handle", "_output_hook", "layer", "num_calls", "subscriber")

    def __init__(self, layer: str, module: nn.Module, subscriber: Hooks) -> None:
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


MAX_NAMED = 8  # parameters with a non-finite gradient that are reported in one step
_MAY_STOP = frozenset({HookAction.STOP_TRAINING, HookAction.CUSTOM_CALLBACK})
_log = logging.getLogger("sonde")


class Attachment:
    """Registers and removes the torch hooks. It holds weak references to the model and the optimizers."""

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], subscriber: Hooks) -> None:
        self._model = weakref.ref(model)
        self._optimizers = [weakref.ref(each) for each in optimizers]
        self._subscriber = subscriber
        self._module_hooks: dict[str, ModuleHook] = {}
        self._handles: list[Any] = []
        self._entry_handle: Any = None
        self._has_warned = False

    @property
    def has_optimizer(self) -> bool:
        return bool(self._optimizers)

    def connect(self, before_update: Callable[[int], None], after_update: Callable[[int], None]) -> None:
        """Registers hooks on the optimizers. The callbacks receive the index of the optimizer; the first one counts the steps."""
        for index, ref in enumerate(self._optimizers):
            optimizer = ref()
            if optimizer is not None:
                before, after = partial(before_update, index), partial(after_update, index)
                self._handles.append(optimizer.register_step_pre_hook(NotifyHook(before)))
                self._handles.append(optimizer.register_step_post_hook(NotifyHook(after)))

    def update(
        self, hooks: Sequence[RegisteredHook], on_forward_start: Callable[[], None], *, keep_uncalled: bool
    ) -> dict[str, list[RegisteredHook]]:
        """Adds module hooks that are needed and removes others. Returns the hooks by layer. `keep_uncalled` leaves module hooks that were
        never called: they may be inside compiled code, and their removal would recompile it."""
        model = self._model()
        on_layers = [each for each in hooks if not each.hook.is_per_step]
        plan: dict[str, list[RegisteredHook]] = {}
        if model is None:
            return plan
        layers = ModelLayers(model) if on_layers else None
        for each in on_layers:
            assert layers is not None
            each.layers = tuple(_selected_layers(each, layers))
            for name in each.layers:
                plan.setdefault(name, []).append(each)
        if layers is not None:
            self._warn_unobservable(layers)
            for name in plan.keys() - self._module_hooks.keys():
                self._module_hooks[name] = ModuleHook(name, layers.modules[name], self._subscriber)
        for name in self._module_hooks.keys() - plan.keys():
            if self._module_hooks[name].num_calls or not keep_uncalled:
                self._module_hooks.pop(name).remove()
        may_stop = any(not _MAY_STOP.isdisjoint(each.hook.actions) for each in hooks)
        if may_stop and self._entry_handle is None:
            self._entry_handle = model.register_forward_pre_hook(NotifyHook(on_forward_start))
        elif self._entry_handle is not None and not may_stop and not keep_uncalled:
            self._entry_handle.remove()
            self._entry_handle = None
        return plan

    def gradient_norm(self) -> float | None:
        """The norm of all gradients of the optimizers; None without a gradient."""
        gradients = [p.grad for p in self._parameters(self._optimizers) if p.grad is not None]
        return float(reductions.check_finite(gradients)[0] ** 0.5) if gradients else None

    def nonfinite_gradients(self, optimizer: int) -> list[tuple[str, torch.Tensor]]:
        """Names and gradients of this optimizer's parameters with NaN or Inf. Costs one read of all gradients if they are finite."""
        parameters = [p for p in self._parameters(self._optimizers[optimizer : optimizer + 1]) if p.grad is not None]
        first = reductions.check_finite([p.grad for p in parameters])[1]
        if first < 0:
            return []
        model = self._model()
        names = {id(p): name for name, p in (unwrap_compiled(model) or model or nn.Module()).named_parameters()}
        bad = (p for p in parameters[first:] if reductions.check_finite([p.grad])[1] == 0)
        return [(names.get(id(p), "a parameter outside of the model"), p.grad) for p in islice(bad, MAX_NAMED) if p.grad is not None]

    def _parameters(self, refs: Iterable[weakref.ref[torch.optim.Optimizer]]) -> list[torch.Tensor]:
        """The parameters of these optimizers, or of the model if there are none."""
        optimizers, model = [optimizer for ref in refs if (optimizer := ref()) is not None], self._model()
        if not self._optimizers and model is not None:
            return list(model.parameters())
        return [p for optimizer in optimizers for p in optimizer_parameters(optimizer)]

    def learning_rate(self) -> float | None:
        optimizer = self._optimizers[0]() if self._optimizers else None
        return read_scalar(optimizer.param_groups[0]["lr"]) if optimizer is not None else None

    def remove(self) -> None:
        for hook in self._module_hooks.values():
            hook.remove()
        for handle in (*self._handles, *([self._entry_handle] if self._entry_handle is not None else [])):
            handle.remove()
        self._module_hooks, self._handles, self._entry_handle = {}, [], None

    def _warn_unobservable(self, layers: ModelLayers) -> None:
        if layers.unobservable and not self._has_warned:
            self._has_warned = True
            reasons = [f"{path or 'the whole model'}: {reason.partition(';')[0]}" for path, reason in layers.unobservable]
            _log.warning("sonde: hooks do not observe all layers. %s.", listing(reasons))


def check_model_and_optimizers(model: Any, optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers as a list. Raises a `SondeError` for other types."""
    if not isinstance(model, nn.Module):
        raise SondeError(f"hooks are attached to a torch.nn.Module, not to {type(model).__name__}. Pass the model itself.")
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise SondeError(f"optimizer must be a torch.optim.Optimizer or a list of them, not {type(each).__name__}.")
    return optimizers


def _selected_layers(registered: RegisteredHook, layers: ModelLayers) -> Iterable[str]:
    patterns = registered.hook.patterns
    module_ids: set[int] = set()  # a module with two names is hooked once
    for name in layers.leaves if patterns is None else patterns.select(layers.modules):
        if name not in layers.hidden and id(layers.modules[name]) not in module_ids:
            module_ids.add(id(layers.modules[name]))
            yield name
