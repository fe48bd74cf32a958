"""The patches of torch and the global hooks of its optimizers, which call the subscribers of a training.

`subscribe` installs them with the first subscriber and `unsubscribe` removes them with the last. A patched function does what it did, with
the same arguments, result and exceptions. Only this module, `forward_call_patch` and `monkeypatch` patch torch.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from sonde.capture.forward_call_patch import watch_compiled_wrappers
from sonde.capture.monkeypatch import hide_from_warnings, replace
from sonde.capture.training_callbacks import TrainingCallbacks, add_subscriber, remove_subscriber, subscribers
from sonde.statistics.private_torch_api import DataLoaderIterator, graph_task_id, is_initial_scheduler_step, skip_in_dynamo

_undo: list[Callable[[], None]] = []  # removes each patch
iterators: weakref.WeakSet[Any] = weakref.WeakSet()
"""Iterators of the DataLoaders that were started while somebody was subscribed."""


def subscribe(callbacks: TrainingCallbacks) -> None:
    """Call these callbacks from now on; the first subscriber puts the patches in."""
    if not _undo:
        _install()
    add_subscriber(callbacks)


def unsubscribe(callbacks: TrainingCallbacks) -> None:
    """Stop calling; the last subscriber takes the patches out."""
    if not remove_subscriber(callbacks):
        while _undo:
            _undo.pop()()


def _install() -> None:
    for hook, register in (
        (_optimizer_step_start, register_optimizer_step_pre_hook), (_optimizer_step_end, register_optimizer_step_post_hook),
    ):  # fmt: skip
        skip_in_dynamo(hook, recursive=True)
        _undo.append(register(hook).remove)
    _patch(torch.autograd, "backward", _wrap_backward)
    _patch(torch.optim.Optimizer, "__init__", functools.partial(_wrap_method, "on_optimizer_created"))
    _patch(torch.optim.Optimizer, "zero_grad", functools.partial(_wrap_method, "on_zero_grad"))
    _patch(nn.Module, "zero_grad", functools.partial(_wrap_method, "on_zero_grad"))
    for module in (nn.utils, nn.utils.clip_grad):
        _patch(module, "clip_grad_norm_", _wrap_clip)
        _patch(module, "clip_grad_value_", _wrap_clip)
    for scheduler in vars(lr_scheduler).values():
        if isinstance(scheduler, type) and issubclass(scheduler, lr_scheduler.LRScheduler):
            _patch(scheduler, "step", _wrap_scheduler_step)
            _patch(scheduler, "__init__", functools.partial(_wrap_scheduler_init, scheduler))
    _patch(torch.amp.GradScaler, "scale", functools.partial(_wrap_method, "on_loss_scaled"))
    _patch(torch.amp.GradScaler, "step", _wrap_scaler_step)
    if DataLoaderIterator is not None:
        _patch(DataLoaderIterator, "__next__", _wrap_next_batch)
    _patch(dataloader.DataLoader, "__iter__", _wrap_loader_iter)
    for module in (torch, torch.serialization):
        _patch(module, "save", _wrap_save)
    if torch.accelerator.is_available():  # without a device nothing is transferred to one, and nothing is patched
        for name in ("to", "cuda"):
            _undo.append(replace(torch.Tensor, name, lambda original: functools.wraps(original)(_wrap_transfer(original))))
    _patch(torch, "compile", _wrap_compile)
    _patch(nn.Module, "compile", _wrap_compile)


def _patch(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    if owner.__dict__.get(name) is None:
        return  # another torch version may not have it: then that call is not observed

    def make(original: Any) -> Any:
        made = wrap(original)
        hide_from_warnings(made)
        skip_in_dynamo(made, recursive=False)
        return functools.wraps(original)(made)

    # Without subscribers the made function only passes the call on: where somebody wrapped it meanwhile, it stays.
    _undo.append(replace(owner, name, make))


def _optimizer_step_start(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if is_compiling():  # a whole step is compiled: what is called here would be compiled into it
        return
    has_closure = any(map(callable, (*args[1:], *kwargs.values())))
    for subscriber in subscribers():
        subscriber.on_optimizer_step_start(optimizer, has_closure)


def _optimizer_step_end(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if is_compiling():
        return
    for subscriber in subscribers():
        subscriber.on_optimizer_step_end(optimizer)


def _wrap_backward(original: Any) -> Any:
    def backward(*args: Any, **kwargs: Any) -> Any:
        # A backward inside of a backward (re-entrant checkpointing) is part of the outer one.
        if is_compiling() or graph_task_id() != -1 or not (called := subscribers()):
            return original(*args, **kwargs)
        tensors = args[0] if args else kwargs.get("tensors")
        for subscriber in called:
            subscriber.on_backward_start(tensors)
        del tensors
        try:
            return original(*args, **kwargs)
        finally:
            for subscriber in called:
                subscriber.on_backward_end()

    return backward


def _wrap_method(callback: str, original: Any) -> Any:
    """After the method, this callback is called with its object."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not is_compiling():
            for subscriber in subscribers():
                getattr(subscriber, callback)(self)
        return result

    return method


def _wrap_clip(original: Any) -> Any:
    def clip(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not is_compiling():
            limit = args[1] if len(args) > 1 else kwargs.get("max_norm", kwargs.get("clip_value"))
            for subscriber in subscribers():
                subscriber.on_clip(limit)
        return result

    return clip


def _wrap_scheduler_step(original: Any) -> Any:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        # The constructor and composed schedulers call step themselves: only the user's call counts.
        is_inner = is_initial_scheduler_step(self) or sys._getframe(1).f_code.co_filename == lr_scheduler.__file__
        for subscriber in () if is_inner or is_compiling() else subscribers():
            subscriber.on_scheduler_step(self, bool(args or kwargs))
        return result

    return step


def _wrap_scheduler_init(owner: type, original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # A constructor calls that of its base: the outermost of torch's own returns last.
        constructors = (kind for kind in type(self).__mro__ if kind.__module__ == owner.__module__ and "__init__" in vars(kind))
        if next(constructors, None) is owner:
            for subscriber in subscribers():
                subscriber.on_scheduler_created(self)

    return __init__


def _wrap_scaler_step(original: Any) -> Any:
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        called = subscribers()
        for subscriber in called:
            subscriber.on_scaler_step_start(self, optimizer)
        try:
            return original(self, optimizer, *args, **kwargs)
        finally:
            for subscriber in called:
                subscriber.on_scaler_step_end(self, optimizer)

    return step


def _wrap_next_batch(original: Any) -> Any:
    def __next__(self: Any) -> Any:
        called = subscribers()
        for subscriber in called:
            subscriber.on_batch_start()
        batch = None
        try:
            batch = original(self)
            return batch
        finally:
            for subscriber in called:
                subscriber.on_batch_end(batch)

    return __next__


def _wrap_loader_iter(original: Any) -> Any:
    def __iter__(self: Any) -> Any:
        for subscriber in subscribers():
            subscriber.on_loader_start(self)
        with _phase("data", self):
            iterator = original(self)
            iterators.add(iterator)
            return iterator

    return __iter__


def _wrap_save(original: Any) -> Any:
    def save(*args: Any, **kwargs: Any) -> Any:
        with _phase("checkpoint"):
            return original(*args, **kwargs)

    return save


def _wrap_transfer(original: Any) -> Any:
    def transfer(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Only what leaves the memory of the CPU: between devices and within one nothing is waited for.
        if is_compiling() or self.device.type != "cpu" or not subscribers():
            return original(self, *args, **kwargs)
        with _phase("transfer"):
            return original(self, *args, **kwargs)

    return transfer


@contextlib.contextmanager
def _phase(phase: str, owner: Any = None) -> Iterator[None]:
    called = subscribers()
    for subscriber in called:
        subscriber.on_phase_start(phase, owner)
    try:
        yield
    finally:
        for subscriber in called:
            subscriber.on_phase_end(phase)


def _wrap_compile(original: Any) -> Any:
    def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        for subscriber in subscribers():
            subscriber.on_compile(model)
        compiled = original(model, *args, **kwargs) if model is not None else original(*args, **kwargs)
        watch_compiled_wrappers()
        return compiled

    return compile
