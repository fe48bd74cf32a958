"""Sees every operation while it is entered, and enters in the book what the operation made: whose it is, and in which phase.

Under fake tensors the same is seen of a step that is never computed. What a program reads from such a tensor (`loss.item()`) is a
stand-in, so that it can go on: how much memory a step takes hardly ever depends on its numbers.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from sonde.capture.gradient_state import optimizer_parameters
from sonde.memory_profiler.device_usage import Place
from sonde.memory_profiler.fake_lstm_workspace import with_workspace
from sonde.memory_profiler.memory_report import Peak, Usage
from sonde.memory_profiler.storage_registry import OUTSIDE, Book, census, tensors_of
from sonde.nonfinite.module_stack import ModuleStack
from sonde.statistics.tensor_utils import find_tensors

ROOT = "(the model itself)"
NUM_TO_RETIRE = 3  # errors of ours before the book is closed

_log = logging.getLogger("sonde")
_READ = torch.ops.aten._local_scalar_dense.default


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enter and leave it as a context. `on_step` is called whenever an optimizer has stepped."""

    def __init__(
        self, models: Mapping[str, nn.Module], optimizers: list[Optimizer], *, fake: bool = False, on_step: Callable[[], None] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.book = Book(self._where)
        self.batch_size = 0
        self.num_steps = 0
        self.notes: list[str] = []
        self.is_fake = fake
        self._on_step = on_step
        self._modules = ModuleStack(models)
        self._models: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._parts: set[int] = set()  # ids of all of their modules: a part may be called alone, by the user or by a checkpoint
        self._are_given = bool(models)
        self._names: dict[int, str] = {}  # by id of a parameter, the module that it is in
        self._shapes: set[tuple[int, ...]] = set()  # of parameters
        self._parameters: dict[int, weakref.ref[Tensor]] = {}
        self._handles: list[Any] = []
        self._operation: Any = None
        self._args: Any = ()
        self._in_optimizer = False
        self._num_errors = 0
        self._entered = False
        self.is_deaf = False  # for a while: what runs then is not the training
        for name, model in models.items():
            self._learn(name, model)
        for optimizer in optimizers:
            self._own(optimizer)
        if not fake:
            census(self.book)
        self.book.settled()

    def __enter__(self) -> Tracker:
        # Before those of the module stack: a module that is called while the stack is empty is called from outside.
        self._handles += [
            register_module_forward_pre_hook(self._entering),
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ended),
        ]
        self._modules.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        self._entered = True
        for ref in self._parameters.values():
            parameter = ref()
            if parameter is not None:
                self._hook(parameter)
        return self

    def __exit__(self, kind: Any = None, error: Any = None, trace: Any = None) -> None:
        if not self._entered:
            return
        self._entered = False
        while self._handles:
            self._handles.pop().remove()
        self._modules.__exit__(kind, error, trace)
        if self._modules.has_compiled_model:
            self.notes.append("a compiled model was called: what its compiled parts hold inside is not seen")
        self._modules.release()
        if _get_current_dispatch_mode() is self:
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        else:
            # Somebody has entered a mode since and not left it: taking out the topmost would take out theirs.
            self.notes.append("another torch mode was entered meanwhile; stop the profiler outside of it")
        self.book.strike_out()

    # -- every operation ---------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_fake and func is _READ:
            return _stand_in(args[0])
        if not self._entered or self.is_deaf:
            return func(*args, **(kwargs or {}))
        self._look_at(None, func, args)
        result = func(*args, **(kwargs or {}))
        if self.is_fake:
            result = with_workspace(func, args, result)
        self._look_at(result, func, args)
        self._args = ()
        return result

    def _look_at(self, result: Any, func: Any, args: Any) -> None:
        if self._num_errors >= NUM_TO_RETIRE:
            return
        try:
            self._operation, self._args = func, args
            self.book.strike_out()
            for tensor in _flat(args if result is None else result):
                self.book.enter(tensor, self._place if result is not None else _from_elsewhere)
            if result is not None:
                self.book.settled()
        except Exception as error:  # the training must not suffer from being measured
            self._num_errors += 1
            if self._num_errors == NUM_TO_RETIRE:
                self.notes.append(f"measuring failed and was ended ({type(error).__name__}: {error})"[:300])
                _log.warning("sonde: memory is not measured any more: %s: %s", type(error).__name__, error)

    def _place(self, tensor: Tensor) -> tuple[Place, bool]:
        """What a tensor is that the operation under way has made. A closure runs forward and backward inside of an optimizer's step."""
        module, backward = self._under_way(), _in_backward()
        if module or backward:
            place = ("activations" if module else "gradients", module)  # a module within backward: a checkpoint is computed again
            return place, bool(self.batch_size) and tensor.dim() > 0 and tuple(tensor.shape) not in self._shapes
        if self._in_optimizer:
            return ("optimizer state", ""), False
        if any((self.book.place_of(given) or OUTSIDE)[0] == "activations" for given in _flat(self._args)):
            return ("activations", ""), bool(self.batch_size) and tensor.dim() > 0  # the loss, computed outside of any module
        return OUTSIDE, False

    def _under_way(self) -> str:
        return (self._modules.module or ROOT) if self._modules.module_type else ""

    def _where(self) -> Peak:
        module = self._under_way()
        phase = "backward" if _in_backward() else "forward" if module else "optimizer" if self._in_optimizer else ""
        name = str(self._operation).removesuffix(".default") if self._operation is not None else ""
        return Peak(Usage(), perf_counter() - self.book.began, phase, module, name, self._modules.line().source if name else "")

    # -- whose is it -------------------------------------------------------------------------------

    def _entering(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self.is_deaf:
            return
        try:
            if not self.batch_size and torch.is_grad_enabled():
                self.batch_size = next((int(tensor.shape[0]) for _, tensor in find_tensors(args) if tensor.dim()), 0)
            if not self._modules.module_type and not self._are_given and id(module) not in self._parts:
                self._learn(type(module).__name__ if self._models else "", module)  # named as `ModuleStack` does
        except Exception as error:
            _log.warning("sonde: the memory of a %s is not named: %s: %s", type(module).__name__, type(error).__name__, error)

    def _learn(self, name: str, model: nn.Module) -> None:
        if not any(ref() is model for _, ref in self._models):
            self._models.append((name, weakref.ref(model)))
        for path, module in model.named_modules():
            self._parts.add(id(module))
            where = ".".join(part for part in (name, path.removeprefix("_orig_mod").removeprefix(".")) if part) or ROOT
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and not nn.parameter.is_lazy(tensor):
                    self._names[id(tensor)] = where
                    self.book.assign(tensor, ("parameters", where))
                    if isinstance(tensor, nn.Parameter):
                        self._shapes.add(tuple(tensor.shape))
                        self._follow(tensor)

    def _follow(self, parameter: Tensor) -> None:
        """Its gradients are told from others from now on."""
        known = self._parameters.get(id(parameter))
        if known is None or known() is not parameter:
            self._parameters[id(parameter)] = weakref.ref(parameter)
            if parameter.grad is not None:
                self._accumulated(parameter)
            if self._entered:
                self._hook(parameter)

    def _hook(self, parameter: Tensor) -> None:
        if parameter.requires_grad and parameter.is_leaf:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._accumulated))  # type: ignore[no-untyped-call]

    def _accumulated(self, parameter: Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        gradient = parameter.grad
        if gradient is not None:
            self.book.assign(gradient, ("gradients", self._names.get(id(parameter), "")))

    def _own(self, optimizer: Optimizer) -> None:
        for parameter in optimizer_parameters(optimizer):
            where = self._names.get(id(parameter), "")
            self.book.assign(parameter, ("parameters", where))
            self._follow(parameter)
            for tensor in tensors_of(optimizer.state.get(parameter, {})):
                self.book.assign(tensor, ("optimizer state", where))

    def _optimizer_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._in_optimizer = True

    def _optimizer_ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._in_optimizer = False
        if self.is_deaf:
            return
        try:
            for name, ref in self._models if self.num_steps == 0 else ():  # lazy parameters are known by now
                model = ref()
                if model is not None:
                    self._learn(name, model)
            self._own(optimizer)
        except Exception as error:
            self._num_errors += 1
            _log.warning("sonde: the state of an optimizer is not named: %s: %s", type(error).__name__, error)
        self.num_steps += 1
        if self._on_step is not None:
            self._on_step()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _from_elsewhere(tensor: Tensor) -> tuple[Place, bool]:
    """It was made where no operation was seen: by numpy, by another thread, before the start."""
    return OUTSIDE, False


def _flat(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    found: list[Tensor] = []
    for value in values if isinstance(values, (tuple, list)) else ():
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def _stand_in(tensor: Tensor) -> float | int | bool | complex:
    """A number that a program can go on with: a loss that is finite, an index that is valid, a condition that is not met."""
    if tensor.dtype is torch.bool:
        return False
    return 1.0 if tensor.dtype.is_floating_point else 0 if not tensor.dtype.is_complex else 1j
