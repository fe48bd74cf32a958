"""The torch hooks of `Hooks`, on layers, on their outputs and on optimizers: they raise nothing except `TrainingStopped` between steps."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice, product
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sonde.capture.forward_call_patch import UncopiedHook
from sonde.capture.training_callbacks import TrainingCallbacks
from sonde.capture.watched_model import WatchedModel
from sonde.capture.zero_grad_tracking import optimizer_parameters
from sonde.formatting import listing
from sonde.layer_name_patterns import LayerPatterns
from sonde.statistics import reductions
from sonde.statistics.find_tensors import find_tensors, read_scalar
from sonde.statistics.private_torch_api import graph_task_id, unwrap_compiled
from sonde.tools.hook_that_never_raises import SafeHook
from sonde.tools.hooks.hook_actions import RegisteredHook
from sonde.tools.hooks.hook_builder import HookAction

if TYPE_CHECKING:
    from sonde.tools.hooks.hook_manager import Hooks


class ModuleHook:
    """The forward hook on one layer, with gradient hooks on its outputs."""

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
        if not torch.compiler.is_compiling():
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
        self._hidden: set[str] = set()  # names inside of unobservable modules
        for path, module in body.named_modules(remove_duplicate=False):
            self.modules[path or root] = module
            if hidden and f"{path}.".startswith(hidden):
                self._hidden.add(path or root)
        self._leaves = [path or root for path, _ in watched.leaves()]

    def select(self, patterns: LayerPatterns | None) -> list[str]:
        """The names of the observable layers that match, or of all leaves; a module with two names has the first."""
        names = self._leaves if patterns is None else patterns.select(self.modules)
        by_module: dict[int, str] = {}
        for name in names:
            if name not in self._hidden:
                by_module.setdefault(id(self.modules[name]), name)
        return list(by_module.values())

    def has_match(self, patterns: LayerPatterns | None) -> bool:
        """Whether any layer matches, also one that hooks cannot observe."""
        return patterns is None or any(map(patterns.matches, self.modules))


MAX_NAMED = 8  # parameters with a non-finite gradient that are reported in one step
_MAY_STOP = frozenset({HookAction.STOP_TRAINING, HookAction.CUSTOM_CALLBACK})
_log = logging.getLogger("sonde")


class Attachment:
    """Registers and removes the torch hooks. It holds weak references to the model and the optimizers."""

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], subscriber: Hooks) -> None:
        self._model = weakref.ref(model)
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._subscriber = subscriber
        self._module_hooks: dict[str, ModuleHook] = {}
        self._handles: list[Any] = []
        self._entry_handle: Any = None
        self._has_warned = False
        self.add_optimizers(optimizers)

    @property
    def has_optimizer(self) -> bool:
        return bool(self._optimizers)

    def is_of(self, model: nn.Module) -> bool:
        return self._model() is model

    def add_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """The first of all counts the steps."""
        subscriber = self._subscriber
        for index, optimizer in enumerate(optimizers, len(self._optimizers)):
            self._optimizers.append(weakref.ref(optimizer))
            before, after = partial(subscriber.on_optimizer_step_start, index), partial(subscriber.on_optimizer_step_end, index)
            self._handles.append(optimizer.register_step_pre_hook(NotifyHook(before)))
            self._handles.append(optimizer.register_step_post_hook(NotifyHook(after)))

    def update(self, hooks: Sequence[RegisteredHook], *, keep_uncalled: bool) -> dict[tuple[str, bool], list[RegisteredHook]]:
        """Adds module hooks that are needed and removes others. Returns the hooks by layer and pass (True: forward). `keep_uncalled` leaves
        module hooks that were never called: they may be inside compiled code, and their removal would recompile it."""
        model, needed = self._model(), set[str]()
        plan: dict[tuple[str, bool], list[RegisteredHook]] = {}
        if model is None:
            return plan
        on_layers = [each for each in hooks if not each.hook.is_per_step]
        if on_layers:
            layers = ModelLayers(model)
            for each in on_layers:
                each.layers = tuple(layers.select(each.hook.patterns))
                each.matches_no_layer = not layers.has_match(each.hook.patterns)
                needed.update(each.layers)
                for key in product(each.layers, (True, False)):
                    if each.hook.runs_in(is_forward=key[1]):
                        plan.setdefault(key, []).append(each)
            if layers.unobservable and not self._has_warned:
                self._has_warned = True
                reasons = [f"{path or 'the whole model'}: {reason.partition(';')[0]}" for path, reason in layers.unobservable]
                _log.warning("sonde: hooks do not observe all layers. %s.", listing(reasons))
            for name in needed - self._module_hooks.keys():
                self._module_hooks[name] = ModuleHook(name, layers.modules[name], self._subscriber)
        for name in self._module_hooks.keys() - needed:
            if self._module_hooks[name].num_calls or not keep_uncalled:
                self._module_hooks.pop(name).remove()
        may_stop = any(not _MAY_STOP.isdisjoint(each.hook.actions) for each in hooks)
        if may_stop and self._entry_handle is None:
            self._entry_handle = model.register_forward_pre_hook(NotifyHook(self._subscriber.raise_requested_stop))
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
        for each in (*self._module_hooks.values(), *self._handles, self._entry_handle):
            if each is not None:
                each.remove()
        self._module_hooks, self._handles, self._entry_handle = {}, [], None
