"""Follows every torch operation with a dispatch mode and registers the storages that it allocates, with their owner and phase.

With fake tensors the same works for a step that is never computed. A number that the program reads from a fake tensor (`loss.item()`) is a
placeholder: the memory of a step hardly ever depends on its numbers.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sonde.capture import torch_patches
from sonde.capture.forward_call_patch import hook_all_modules
from sonde.capture.training_callbacks import TrainingCallbacks
from sonde.capture.zero_grad_tracking import optimizer_parameters
from sonde.memory_profiler.lstm_workspace_size import with_workspace
from sonde.memory_profiler.memory_report import Peak, Usage
from sonde.memory_profiler.storage_registry import OTHER, Owner, StorageRegistry, add_live_tensors, state_tensors
from sonde.nonfinite.module_stack import ModuleStack, join_path
from sonde.nonfinite.operation_tracer import flatten_tensors
from sonde.statistics.find_tensors import find_tensors
from sonde.statistics.private_torch_api import ITEM_OP, TorchDispatchMode, current_dispatch_mode, graph_task_id

ROOT = "(the model itself)"
MAX_ERRORS = 3  # errors of the tracker before it stops measuring

_log = logging.getLogger("sonde")


class AllocationTracker(TorchDispatchMode, TrainingCallbacks):  # type: ignore[no-untyped-call]
    """Tracks allocations while it is entered as a context; `on_step` is called after every optimizer step."""

    is_called_in_forks = True  # a forked child has the dispatch mode and the module hooks too

    def __init__(
        self, models: Mapping[str, nn.Module], optimizers: list[Optimizer], *, fake: bool = False, on_step: Callable[[], None] | None = None
    ) -> None:
        """`models` are keyed by the prefix of their paths; without any, models are found when they are called. With `fake`, tensors that
        exist already are not counted and numbers read from tensors are placeholders."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.registry = StorageRegistry(self._describe_moment)
        self.batch_size = 0
        self.num_steps = 0
        self.notes: list[str] = []
        self.is_fake = fake
        self._is_paused = False
        self._on_step = on_step
        self._module_stack = ModuleStack(models)
        self._models: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._module_ids: set[int] = set()  # of all of their modules: a part may be called alone, by the user or by a checkpoint
        self._has_named_models = bool(models)
        self._names: dict[int, str] = {}  # by id of a parameter, the path of its module
        self._parameter_shapes: set[tuple[int, ...]] = set()
        self._parameters: dict[int, weakref.ref[Tensor]] = {}
        self._handles: list[Any] = []  # of the hooks on gradients
        self._remove_module_hook: Callable[[], None] = lambda: None
        self._operation: Any = None
        self._args: Any = ()
        self._in_optimizer = False
        self._num_errors = 0
        self._is_entered = False
        for name, model in models.items():
            self._add_model(name, model)
        for optimizer in optimizers:
            self._add_optimizer(optimizer)
        if not fake:
            add_live_tensors(self.registry)
        self.registry.end_operation()

    def __enter__(self) -> AllocationTracker:
        # Registered before those of the module stack: a module that is called while the stack is empty is an outermost one.
        self._remove_module_hook = hook_all_modules(before=self._on_forward_start)
        torch_patches.subscribe(self)
        self._module_stack.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        self._is_entered = True
        for parameter in [ref() for ref in self._parameters.values()]:
            if parameter is not None:
                self._hook_gradient(parameter)
        return self

    def __exit__(self, *error: Any) -> None:
        if not self._is_entered:
            return
        self._is_entered = False
        torch_patches.unsubscribe(self)
        while self._handles:
            self._handles.pop().remove()
        self._remove_module_hook()
        self._module_stack.__exit__()
        if self._module_stack.has_compiled_model:
            self.notes.append("a compiled model was called: memory inside its compiled parts is not tracked")
        self._module_stack.release()
        if current_dispatch_mode() is self:
            super().__exit__(*(error or (None, None, None)))  # type: ignore[no-untyped-call]
        else:
            # Another mode was entered since and not left: popping the topmost mode would remove that one.
            self.notes.append("another torch mode was entered meanwhile; stop the profiler outside of it")
        self.registry.remove_freed()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operations inside are not tracked: they are not part of the training."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_fake and func is ITEM_OP:
            return _placeholder(args[0])
        if not self._is_entered or self._is_paused:
            return func(*args, **(kwargs or {}))
        self._register(None, func, args)
        result = func(*args, **(kwargs or {}))
        if self.is_fake:
            result = with_workspace(func, args, result)
        self._register(result, func, args)
        self._args = ()
        return result

    def _register(self, result: Any, func: Any, args: Any) -> None:
        """Registers the arguments of an operation before it runs (`result` is None), or its result."""
        if self._num_errors >= MAX_ERRORS:
            return
        try:
            self._operation, self._args = func, args
            self.registry.remove_freed()
            for tensor in flatten_tensors(args if result is None else result):
                # No tracked operation allocated an argument that is new: it is from numpy, another thread, or before the start.
                self.registry.add(tensor, self._owner if result is not None else lambda _: (OTHER, False))
            if result is not None:
                self.registry.end_operation()
        except Exception as error:  # an error of the tracker must not reach the training
            self._num_errors += 1
            if self._num_errors == MAX_ERRORS:
                self.notes.append(f"measuring failed and was stopped ({type(error).__name__}: {error})"[:300])
                _log.warning("sonde: memory is no longer measured: %s: %s", type(error).__name__, error)

    def _owner(self, tensor: Tensor) -> tuple[Owner, bool]:
        """The owner of a tensor that the current operation allocated, and whether it grows with the batch. Module and backward are checked
        before the optimizer: a closure runs forward and backward inside the optimizer's step."""
        module, in_backward = self._current_module(), _in_backward()
        if module or in_backward:
            owner = ("activations" if module else "gradients", module)  # a module inside a backward: a checkpoint recomputes
            return owner, bool(self.batch_size) and tensor.dim() > 0 and tuple(tensor.shape) not in self._parameter_shapes
        if self._in_optimizer:
            return ("optimizer state", ""), False
        if any(self.registry.owner_of(arg)[0] == "activations" for arg in flatten_tensors(self._args)):
            return ("activations", ""), bool(self.batch_size) and tensor.dim() > 0  # the loss, computed outside of all modules
        return OTHER, False

    def _current_module(self) -> str:
        return (self._module_stack.module or ROOT) if self._module_stack.module_type else ""

    def _describe_moment(self) -> Peak:
        module = self._current_module()
        phase = "backward" if _in_backward() else "forward" if module else "optimizer" if self._in_optimizer else ""
        name = str(self._operation).removesuffix(".default") if self._operation is not None else ""
        source = self._module_stack.line().source if name else ""
        return Peak(Usage(), perf_counter() - self.registry.start, phase, module, name, source)

    def _on_forward_start(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self._is_paused:
            return
        try:
            if not self.batch_size and torch.is_grad_enabled():
                self.batch_size = next((int(tensor.shape[0]) for _, tensor in find_tensors(args) if tensor.dim()), 0)
            if not self._module_stack.module_type and not self._has_named_models and id(module) not in self._module_ids:
                self._add_model(type(module).__name__ if self._models else "", module)  # the same names as in the module stack
        except Exception as error:
            _log.warning("sonde: the memory of a %s cannot be named: %s: %s", type(module).__name__, type(error).__name__, error)

    def _add_model(self, name: str, model: nn.Module) -> None:
        if not any(ref() is model for _, ref in self._models):
            self._models.append((name, weakref.ref(model)))
        for path, module in model.named_modules():
            self._module_ids.add(id(module))
            full_path = join_path(name, path) or ROOT
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and not nn.parameter.is_lazy(tensor):
                    self._names[id(tensor)] = full_path
                    self.registry.assign(tensor, ("parameters", full_path))
                    if isinstance(tensor, nn.Parameter):
                        self._parameter_shapes.add(tuple(tensor.shape))
                        self._add_parameter(tensor)

    def _add_parameter(self, parameter: Tensor) -> None:
        """From now on its gradients are assigned to it."""
        known = self._parameters.get(id(parameter))
        if known is None or known() is not parameter:
            self._parameters[id(parameter)] = weakref.ref(parameter)
            self._on_gradient(parameter)
            if self._is_entered:
                self._hook_gradient(parameter)

    def _hook_gradient(self, parameter: Tensor) -> None:
        if parameter.requires_grad and parameter.is_leaf:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))  # type: ignore[no-untyped-call]

    def _on_gradient(self, parameter: Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        if parameter.grad is not None:
            self.registry.assign(parameter.grad, ("gradients", self._names.get(id(parameter), "")))

    def _add_optimizer(self, optimizer: Optimizer) -> None:
        for parameter in optimizer_parameters(optimizer):
            path = self._names.get(id(parameter), "")
            self.registry.assign(parameter, ("parameters", path))
            self._add_parameter(parameter)
            for tensor in state_tensors(optimizer.state.get(parameter, {})):
                self.registry.assign(tensor, ("optimizer state", path))

    def on_optimizer_step_start(self, optimizer: Optimizer, has_closure: bool) -> None:
        self._in_optimizer = True

    def on_optimizer_step_end(self, optimizer: Optimizer) -> None:
        self._in_optimizer = False
        if self._is_paused:
            return
        try:
            for name, ref in self._models if self.num_steps == 0 else ():  # lazy parameters are initialized by now
                model = ref()
                if model is not None:
                    self._add_model(name, model)
            self._add_optimizer(optimizer)
        except Exception as error:
            self._num_errors += 1
            _log.warning("sonde: the state of an optimizer cannot be named: %s: %s", type(error).__name__, error)
        self.num_steps += 1
        if self._on_step is not None:
            self._on_step()


def _in_backward() -> bool:
    return graph_task_id() != -1


def _placeholder(tensor: Tensor) -> float | int | bool | complex:
    """A number with which a program can continue: a finite loss, a valid index, a condition that is not met."""
    if tensor.dtype is torch.bool:
        return False
    return 1.0 if tensor.dtype.is_floating_point else 0 if not tensor.dtype.is_complex else 1j
