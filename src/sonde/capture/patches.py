"""The switchboard: a few guarded patches of torch through which sessions hear the training loop.

The patches are process-wide and are put in with the first listener and taken out with the last, so that sessions may come and go in any
order. A patched function does what it did, with the same arguments, result and exceptions; listeners contain their own errors. In a
forked child nobody listens.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.compiler import is_compiling
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from sonde.capture import tensor_method_patches
from sonde.capture.dynamo import answered_natively, skip_in_dynamo


class Listener(Protocol):
    """What a session hears. `begins`/`ended` come in pairs, `ended` also after an exception."""

    def backward_begins(self, tensors: Any) -> None: ...
    def backward_ended(self) -> None: ...
    def zero_grad(self, target: Any) -> None: ...
    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None: ...
    def optimizer_begins(self, optimizer: torch.optim.Optimizer, closure: bool) -> None: ...
    def optimizer_ended(self, optimizer: torch.optim.Optimizer) -> None: ...
    def scheduler_made(self, scheduler: Any) -> None: ...
    def scheduler_stepped(self, scheduler: Any, given: bool) -> None: ...
    def clipped(self, max_norm: Any) -> None: ...
    def scaled(self, scaler: Any) -> None: ...
    def scaler_step_begins(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None: ...
    def scaler_step_ended(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None: ...
    def pass_begins(self, loader: Any) -> None: ...
    def fetch_begins(self) -> None: ...
    def fetch_ended(self, batch: Any) -> None: ...
    def phase_begins(self, phase: str, call: str, by: Any) -> None: ...
    def phase_ended(self, phase: str) -> None: ...
    def compiling(self, target: Any) -> None: ...


_listeners: tuple[Listener, ...] = ()
iterators: weakref.WeakSet[Any] = weakref.WeakSet()
"""Of the loaders that were started while somebody listened."""
_installed: list[Callable[[], None]] = []  # how to take each patch out again
_graph_task = torch._C._current_graph_task_id  # -1 outside of backward


def listen(listener: Listener) -> None:
    global _listeners
    if not _installed:
        _install()
    _listeners = (*_listeners, listener)


def unlisten(listener: Listener) -> None:
    global _listeners
    _listeners = tuple(other for other in _listeners if other is not listener)
    if not _listeners:
        while _installed:
            _installed.pop()()


def _deaf_in_child() -> None:
    global _listeners
    _listeners = ()


os.register_at_fork(after_in_child=_deaf_in_child)


def _patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = owner.__dict__.get(name)
    if original is None:
        return  # another torch version may not have it: then that call is simply not heard
    made = make(original)
    skip_in_dynamo(made, with_all_it_calls=False)
    wrapper = functools.wraps(original)(made)
    setattr(owner, name, wrapper)

    def undo() -> None:
        # Somebody may have wrapped our wrapper meanwhile: then it stays, and, with nobody listening, only passes through.
        if owner.__dict__.get(name) is wrapper:
            setattr(owner, name, original)

    _installed.append(undo)


def _install() -> None:
    for hook in (_OptimizerBegins, _OptimizerEnded):
        skip_in_dynamo(hook.__call__, with_all_it_calls=True)
    skip_in_dynamo(_Backward.__call__, with_all_it_calls=False)
    pre = register_optimizer_step_pre_hook(_OptimizerBegins())
    post = register_optimizer_step_post_hook(_OptimizerEnded())
    _installed.extend((pre.remove, post.remove))
    _patch(torch.autograd, "backward", _Backward)
    _patch(torch.optim.Optimizer, "__init__", _optimizer_init)
    _patch(torch.optim.Optimizer, "zero_grad", _zero_grad)
    _patch(torch.nn.Module, "zero_grad", _zero_grad)
    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        _patch(module, "clip_grad_norm_", _clip)
        _patch(module, "clip_grad_value_", _clip)
    for scheduler in vars(lr_scheduler).values():
        if isinstance(scheduler, type) and issubclass(scheduler, lr_scheduler.LRScheduler):
            _patch(scheduler, "step", _scheduler_step)
            _patch(scheduler, "__init__", functools.partial(_scheduler_init, scheduler))
    _patch(torch.amp.GradScaler, "scale", _scale)
    _patch(torch.amp.GradScaler, "step", _scaler_step)
    _patch(dataloader._BaseDataLoaderIter, "__next__", _next_batch)
    _patch(dataloader.DataLoader, "__iter__", _start_loader)
    for module in (torch, torch.serialization):
        _patch(module, "save", _save)
    if torch.accelerator.is_available():  # without a device nothing is brought to one, and nothing is patched
        for name in ("to", "cuda"):
            _installed.append(tensor_method_patches.replace(name, lambda original: functools.wraps(original)(_transfer(original))))
    _patch(torch, "compile", _compile)
    _patch(torch.nn.Module, "compile", _compile)


@answered_natively("begins", globals())
class _OptimizerBegins:
    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if is_compiling():  # a whole step is compiled: what would be called here would be compiled into it
            return
        closure = any(map(callable, (*args[1:], *kwargs.values())))
        for listener in _listeners:
            listener.optimizer_begins(optimizer, closure)


@answered_natively("ended", globals())
class _OptimizerEnded:
    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if is_compiling():
            return
        for listener in _listeners:
            listener.optimizer_ended(optimizer)


@answered_natively("backward", globals())
class _Backward:
    """In the place of torch.autograd.backward, whose name, documentation and signature `_patch` gives it."""

    __slots__ = ("__dict__", "original")

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A backward inside a backward (re-entrant checkpointing) is part of the outer one; while compiling nobody may be called.
        if not _listeners or is_compiling() or _graph_task() != -1:
            return self.original(*args, **kwargs)
        listeners = _listeners
        tensors = args[0] if args else kwargs.get("tensors")
        for listener in listeners:
            listener.backward_begins(tensors)
        del tensors
        try:
            return self.original(*args, **kwargs)
        finally:
            for listener in listeners:
                listener.backward_ended()

    def __reduce__(self) -> str:
        return str(self.original.__qualname__)  # copied and pickled as the function is: by its name


def _optimizer_init(original: Any) -> Any:
    def __init__(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for listener in _listeners:
            listener.optimizer_made(self)

    return __init__


def _zero_grad(original: Any) -> Any:
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if _listeners and not is_compiling():
            for listener in _listeners:
                listener.zero_grad(self)
        return result

    return zero_grad


def _clip(original: Any) -> Any:
    def clip(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if is_compiling():
            return result
        limit = args[1] if len(args) > 1 else next(iter(kwargs.values()), None)
        for listener in _listeners:
            listener.clipped(limit)
        return result

    return clip


def _scheduler_step(original: Any) -> Any:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        # The constructor and composed schedulers call step themselves: only the user's call counts.
        if is_compiling() or getattr(self, "_is_initial", False):
            return result
        if sys._getframe(1).f_code.co_filename != lr_scheduler.__file__:
            for listener in _listeners:
                listener.scheduler_stepped(self, bool(args or kwargs))
        return result

    return step


def _scheduler_init(owner: type, original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # A constructor calls that of its base: the outermost of torch's own returns last.
        made = (kind for kind in type(self).__mro__ if kind.__module__ == owner.__module__ and "__init__" in vars(kind))
        if _listeners and next(made, None) is owner:
            for listener in _listeners:
                listener.scheduler_made(self)

    return __init__


def _scale(original: Any) -> Any:
    def scale(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for listener in _listeners:
            listener.scaled(self)
        return result

    return scale


def _scaler_step(original: Any) -> Any:
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        listeners = _listeners
        for listener in listeners:
            listener.scaler_step_begins(self, optimizer)
        try:
            return original(self, optimizer, *args, **kwargs)
        finally:
            for listener in listeners:
                listener.scaler_step_ended(self, optimizer)

    return step


def _next_batch(original: Any) -> Any:
    def __next__(self: Any) -> Any:
        listeners = _listeners
        for listener in listeners:
            listener.fetch_begins()
        batch = None
        try:
            batch = original(self)
            return batch
        finally:
            for listener in listeners:
                listener.fetch_ended(batch)

    return __next__


def _start_loader(original: Any) -> Any:
    def __iter__(self: Any) -> Any:
        for listener in _listeners:
            listener.pass_begins(self)
        with _phase("data", "loader", self):
            iterator = original(self)
            iterators.add(iterator)
            return iterator

    return __iter__


def _save(original: Any) -> Any:
    def save(*args: Any, **kwargs: Any) -> Any:
        with _phase("checkpoint", "checkpoint"):
            return original(*args, **kwargs)

    return save


def _transfer(original: Any) -> Any:
    def transfer(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Only what leaves the memory of the CPU: between devices and within one nothing is waited for.
        if not _listeners or is_compiling() or self.device.type != "cpu":
            return original(self, *args, **kwargs)
        with _phase("transfer", "transfer"):
            return original(self, *args, **kwargs)

    return transfer


@contextlib.contextmanager
def _phase(phase: str, call: str, by: Any = None) -> Iterator[None]:
    listeners = _listeners
    for listener in listeners:
        listener.phase_begins(phase, call, by)
    try:
        yield
    finally:
        for listener in listeners:
            listener.phase_ended(phase)


def _compile(original: Any) -> Any:
    def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        for listener in _listeners:
            listener.compiling(model)
        return original(model, *args, **kwargs) if model is not None else original(*args, **kwargs)

    return compile
