"""Patches of torch and global hooks, through which trainings are observed. No other module of capture patches torch.

`subscribe` puts the patches in with the first subscriber and `unsubscribe` takes them out with the last, so sessions may come and go in any
order. A patched function does what it did, with the same arguments, result and exceptions; subscribers isolate their own errors. Forwards
of single modules are observed by `watch_forward`, without anything on the module itself. A forked child has no subscribers.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from time import perf_counter_ns
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from sonde.capture.call_site import WRAPPER_FILE
from sonde.statistics.torch_internals import (
    DataLoaderIterator,
    compiled_wrapper,
    graph_task_id,
    is_initial_scheduler_step,
    skip_in_dynamo,
    tracing_state,
    unwrap_compiled,
)


class TrainingCallbacks:
    """What a subscriber is called for; every method does nothing unless it is overridden.

    A start is always followed by its end, also after an exception.
    """

    def on_loader_start(self, loader: Any) -> None:
        """A DataLoader begins a pass over its data."""

    def on_batch_start(self) -> None:
        """The loop asks a DataLoader for the next batch."""

    def on_batch_end(self, batch: Any) -> None:
        """The batch is there; None where the loader is exhausted or failed."""

    def on_forward_start(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A forward of a module that is watched by `watch_forward` begins."""

    def on_forward_end(self, module: nn.Module, output: Any) -> Any:
        """That forward is over; `output` is None where it failed."""

    def on_backward_start(self, tensors: Any) -> Any:
        """A backward begins from these tensors."""

    def on_backward_end(self) -> Any:
        """That backward is over."""

    def on_zero_grad(self, owner: Any) -> None:
        """An optimizer or a module has cleared its gradients."""

    def on_clip(self, limit: Any) -> None:
        """Gradients have been clipped to this norm or value."""

    def on_optimizer_created(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has been constructed."""

    def on_optimizer_step_start(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> Any:
        """An optimizer is about to update its parameters."""

    def on_optimizer_step_end(self, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer has stepped."""

    def on_scheduler_created(self, scheduler: Any) -> None:
        """A learning-rate scheduler has been constructed."""

    def on_scheduler_step(self, scheduler: Any, has_argument: bool) -> None:
        """User code has called `scheduler.step()`."""

    def on_loss_scaled(self, scaler: Any) -> None:
        """A GradScaler has scaled a loss."""

    def on_scaler_step_start(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """A GradScaler is asked to step an optimizer."""

    def on_scaler_step_end(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """The GradScaler has stepped the optimizer, or skipped it."""

    def on_phase_start(self, phase: str, owner: Any) -> None:
        """A "data", "checkpoint" or "transfer" phase begins; for data, `owner` is the loader that starts its workers."""

    def on_phase_end(self, phase: str) -> None:
        """That phase is over."""

    def on_compile(self, target: Any) -> None:
        """A module or function is handed to torch.compile."""

    def on_suspend(self) -> None:
        """This thread calls no subscriber until `on_resume`."""

    def on_resume(self, suspended_ns: int) -> None:
        """Calls go on; the time that has passed belongs to no step."""


_subscribers: tuple[TrainingCallbacks, ...] = ()
_suspended_threads: set[int] = set()
_undo: list[Callable[[], None]] = []  # removes each patch
iterators: weakref.WeakSet[Any] = weakref.WeakSet()
"""Iterators of the DataLoaders that were started while somebody was subscribed."""


def subscribe(callbacks: TrainingCallbacks) -> None:
    """Call these callbacks from now on; the first subscriber puts the patches in."""
    global _subscribers
    if not _undo:
        _install()
    _subscribers = (*_subscribers, callbacks)


def unsubscribe(callbacks: TrainingCallbacks) -> None:
    """Stop calling; the last subscriber takes the patches out."""
    global _subscribers
    _subscribers = tuple(other for other in _subscribers if other is not callbacks)
    if not _subscribers:
        while _undo:
            _undo.pop()()


def subscribers() -> tuple[TrainingCallbacks, ...]:
    """Whom to call in this thread."""
    return () if _suspended_threads and get_ident() in _suspended_threads else _subscribers


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Inside, this thread calls no subscriber: for tools that run a model by themselves, which is not training."""
    thread = get_ident()
    if thread in _suspended_threads:
        yield
        return
    affected = _subscribers
    for each in affected:
        each.on_suspend()
    started = perf_counter_ns()
    _suspended_threads.add(thread)
    try:
        yield
    finally:
        _suspended_threads.discard(thread)
        for each in affected:
            each.on_resume(perf_counter_ns() - started)


def _clear_in_child() -> None:
    global _subscribers
    _subscribers = ()
    _suspended_threads.clear()
    for watched in list(_watched_classes.values()):
        watched.entries.clear()
    while _method_patches:
        _method_patches[-1].stop()  # the last one first, so that each finds in its place what it put there


os.register_at_fork(after_in_child=_clear_in_child)


# -- patched functions -----------------------------------------------------------------------------



def _hide_from_warnings(function: Any) -> None:
    """`warnings.warn(..., stacklevel=2)` in a patched function of torch must name the user's line, not ours. Python passes over frames of
    its import system when it counts levels, and recognizes them by these two words in the file name; so our wrappers have them there."""
    function.__code__ = function.__code__.replace(co_filename=WRAPPER_FILE)


def _patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = owner.__dict__.get(name)
    if original is None:
        return  # another torch version may not have it: then that call is not observed
    made = make(original)
    _hide_from_warnings(made)
    skip_in_dynamo(made, recursive=False)
    wrapper = functools.wraps(original)(made)
    setattr(owner, name, wrapper)

    def undo() -> None:
        # Somebody may have wrapped our wrapper meanwhile: then it stays, and without subscribers it only passes the call on.
        if owner.__dict__.get(name) is wrapper:
            setattr(owner, name, original)

    _undo.append(undo)


def _install() -> None:
    for hook in (_optimizer_step_start, _optimizer_step_end):
        skip_in_dynamo(hook, recursive=True)
    _undo.extend(
        (register_optimizer_step_pre_hook(_optimizer_step_start).remove, register_optimizer_step_post_hook(_optimizer_step_end).remove)
    )
    _patch(torch.autograd, "backward", _wrap_backward)
    _patch(torch.optim.Optimizer, "__init__", _wrap_optimizer_init)
    _patch(torch.optim.Optimizer, "zero_grad", _wrap_zero_grad)
    _patch(nn.Module, "zero_grad", _wrap_zero_grad)
    for module in (nn.utils, nn.utils.clip_grad):
        _patch(module, "clip_grad_norm_", _wrap_clip)
        _patch(module, "clip_grad_value_", _wrap_clip)
    for scheduler in vars(lr_scheduler).values():
        if isinstance(scheduler, type) and issubclass(scheduler, lr_scheduler.LRScheduler):
            _patch(scheduler, "step", _wrap_scheduler_step)
            _patch(scheduler, "__init__", functools.partial(_wrap_scheduler_init, scheduler))
    _patch(torch.amp.GradScaler, "scale", _wrap_scale)
    _patch(torch.amp.GradScaler, "step", _wrap_scaler_step)
    if DataLoaderIterator is not None:
        _patch(DataLoaderIterator, "__next__", _wrap_next_batch)
    _patch(dataloader.DataLoader, "__iter__", _wrap_loader_iter)
    for module in (torch, torch.serialization):
        _patch(module, "save", _wrap_save)
    if torch.accelerator.is_available():  # without a device nothing is transferred to one, and nothing is patched
        for name in ("to", "cuda"):
            _undo.append(_replace_tensor_method(name, lambda original: functools.wraps(original)(_wrap_transfer(original))))
    _patch(torch, "compile", _wrap_compile)
    _patch(nn.Module, "compile", _wrap_compile)


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


def _wrap_optimizer_init(original: Any) -> Any:
    def __init__(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for subscriber in subscribers():
            subscriber.on_optimizer_created(self)

    return __init__


def _wrap_zero_grad(original: Any) -> Any:
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not is_compiling():
            for subscriber in subscribers():
                subscriber.on_zero_grad(self)
        return result

    return zero_grad


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
        if is_compiling() or is_initial_scheduler_step(self):
            return result
        if sys._getframe(1).f_code.co_filename != lr_scheduler.__file__:
            for subscriber in subscribers():
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


def _wrap_scale(original: Any) -> Any:
    def scale(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for subscriber in subscribers():
            subscriber.on_loss_scaled(self)
        return result

    return scale


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
        _watch_compiled_wrappers()
        return compiled

    return compile


# -- forwards --------------------------------------------------------------------------------------


class WatchedCall:
    """Stands for `__call__` on a class of modules and calls back for the watched instances; other instances pass.

    Nothing is put on an instance, so a watched module is traced, scripted, saved, copied and compiled as if it were not watched.
    """

    def __init__(self, owner: type[nn.Module]) -> None:
        self.owner: Any = owner
        self.original = owner.__dict__.get("__call__")  # None: inherited
        self._is_compiled_wrapper = owner is compiled_wrapper()
        self.entries: dict[int, tuple[weakref.ref[nn.Module], tuple[TrainingCallbacks, ...]]] = {}

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        # The next `__call__` is looked up at every call, since torch.fx patches that of nn.Module.
        if self.original is not None:
            plain = self.original.__get__(module, owner) if hasattr(type(self.original), "__get__") else self.original
        else:
            plain = super(self.owner, module if module is not None else owner or self.owner).__call__  # type: ignore[misc]
        if module is None:
            return plain
        if not self._is_compiled_wrapper and id(module) not in self.entries:
            return plain
        watched, callbacks = self._find(module)
        return functools.partial(_call_watched, plain, watched, callbacks) if callbacks else plain

    def _find(self, module: nn.Module) -> tuple[nn.Module, tuple[TrainingCallbacks, ...]]:
        """The watched module that this call is a forward of (it may be inside of torch.compile's wrapper), and whom to call."""
        entry = self.entries.get(id(module))
        if entry is not None and entry[0]() is module:
            return module, entry[1]
        inner = unwrap_compiled(module) if self._is_compiled_wrapper else None
        watched = next((_watched_classes[kind] for kind in type(inner).__mro__ if kind in _watched_classes), None)
        return watched._find(inner) if inner is not None and watched is not None else (module, ())

    def __reduce__(self) -> Any:
        """Copied and pickled with its class as the `__call__` that it stands for."""
        return (getattr, (nn.Module, "__call__")) if self.original is None else (operator.itemgetter(0), ((self.original,),))


def _call_watched(plain: Any, module: nn.Module, callbacks: tuple[TrainingCallbacks, ...], /, *args: Any, **kwargs: Any) -> Any:
    if is_compiling() or tracing_state() is not None or (_suspended_threads and get_ident() in _suspended_threads):
        return plain(*args, **kwargs)
    for each in callbacks:
        each.on_forward_start(module, args, kwargs)
    output = None
    try:
        output = plain(*args, **kwargs)
        return output
    finally:
        for each in callbacks:
            each.on_forward_end(module, output)


_hide_from_warnings(_call_watched)
skip_in_dynamo(_call_watched, recursive=False)

_watched_classes: dict[type, WatchedCall] = {}


def _watch_class(owner: type[nn.Module]) -> WatchedCall:
    watched = owner.__dict__.get("__call__")
    if not isinstance(watched, WatchedCall):
        watched = _watched_classes[owner] = WatchedCall(owner)
        owner.__call__ = watched  # type: ignore[method-assign,assignment]
    return watched


def _watch_compiled_wrappers() -> None:
    """A call of torch.compile's wrapper is a forward of the module inside, which the wrapper calls past its class."""
    wrapper = compiled_wrapper()
    if wrapper is not None and _watched_classes:
        _watch_class(wrapper)


def watch_forward(module: nn.Module, callbacks: TrainingCallbacks) -> None:
    """Call `on_forward_start` and `on_forward_end` for this module from now on."""
    watched = _watch_class(type(module))
    _watch_compiled_wrappers()
    entry = watched.entries.get(id(module))
    others = entry[1] if entry is not None and entry[0]() is module else ()
    if callbacks not in others:
        watched.entries[id(module)] = (weakref.ref(module), (*others, callbacks))


def is_forward_watched(module: nn.Module, callbacks: TrainingCallbacks) -> bool:
    """Whether a call of this module is seen: a lazy module becomes one of another class, and some code replaces `__call__` of a class."""
    for kind in type(module).__mro__:
        found = vars(kind).get("__call__")
        entry = found.entries.get(id(module)) if isinstance(found, WatchedCall) else None
        if entry is not None and entry[0]() is module and callbacks in entry[1]:
            return True
        if found is not None and not (isinstance(found, WatchedCall) and found.original is None):
            return False  # this `__call__` hides those of the base classes
    return False


def unwatch_forward(module: nn.Module, callbacks: TrainingCallbacks) -> None:
    """Undo `watch_forward`; the last one of a class restores its `__call__`."""
    for watched in list(_watched_classes.values()):
        entry = watched.entries.get(id(module))
        if entry is not None and entry[0]() is module:
            others = tuple(other for other in entry[1] if other is not callbacks)
            watched.entries[id(module)] = (entry[0], others)
    _restore_classes()


def _restore_classes() -> None:
    classes = list(_watched_classes.items())
    for _, watched in classes:
        watched.entries = {key: entry for key, entry in list(watched.entries.items()) if entry[1] and entry[0]() is not None}
    wrapper = compiled_wrapper()
    is_needed = any(watched.entries for _, watched in classes)
    for owner, watched in classes:
        if watched.entries or (owner is wrapper and is_needed):
            continue
        _watched_classes.pop(owner, None)
        if owner.__dict__.get("__call__") is not watched:
            continue  # somebody replaced it meanwhile
        if watched.original is None:
            del owner.__call__
        else:
            owner.__call__ = watched.original  # type: ignore[method-assign]


def hook_all_modules(*, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None) -> Callable[[], None]:
    """Hooks on the forward of every module of this process; the answer removes them. They slow all modules down, so for one forward or a
    short search only."""
    handles = []
    if before is not None:
        handles.append(register_module_forward_pre_hook(before))
    if after is not None:
        handles.append(register_module_forward_hook(after, always_call=before is not None))

    def remove() -> None:
        while handles:
            handles.pop().remove()

    return remove


# -- methods of tensors ----------------------------------------------------------------------------


class MethodCall(NamedTuple):
    """One call of a patched method."""

    name: str
    args: tuple[Any, ...]  # the tensor itself is the first
    kwargs: dict[str, Any]
    result: Any  # None where it raised
    ns: int
    frame: FrameType  # that called it


def _replace_tensor_method(name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """`make(original)` takes the place of a method of all tensors; the answer undoes it. Tensors inherit most methods from a class of C,
    which cannot be patched, so ours is put in front of it."""
    missing = object()
    own, made = torch.Tensor.__dict__.get(name, missing), make(getattr(torch.Tensor, name))
    setattr(torch.Tensor, name, made)

    def undo() -> None:
        # Somebody may have put their own in its place meanwhile: then that stays.
        if torch.Tensor.__dict__.get(name) is made:
            if own is missing:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, own)

    return undo


class TensorMethodPatch:
    """Calls back after each call of some methods of tensors, from `start` to `stop`, in the thread that starts it."""

    def __init__(self, names: Iterable[str], on_call: Callable[[MethodCall], None]) -> None:
        self._names, self._on_call = tuple(names), on_call
        self._undo: list[Callable[[], None]] = []
        self._thread = -1  # no thread
        self._inside = False
        self._error: Exception | None = None

    def start(self) -> None:
        if not self._undo:
            _method_patches.append(self)
            self._thread, self._inside, self._error = get_ident(), False, None
            self._undo = [_replace_tensor_method(name, self._wrap(name)) for name in self._names if hasattr(torch.Tensor, name)]

    def stop(self) -> None:
        self._thread = -1
        while self._undo:
            self._undo.pop()()
        if self in _method_patches:
            _method_patches.remove(self)

    def check(self) -> None:
        """Raise the last error of the callback."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _wrap(self, name: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def method(*args: Any, **kwargs: Any) -> Any:
                if self._inside or get_ident() != self._thread:
                    return original(*args, **kwargs)
                self._inside = True
                result = None
                began = perf_counter_ns()
                try:
                    result = original(*args, **kwargs)
                    return result
                finally:
                    self._call_back(MethodCall(name, args, kwargs, result, perf_counter_ns() - began, sys._getframe(1)))
                    self._inside = False

            method.__name__ = name
            return method

        return make

    def _call_back(self, call: MethodCall) -> None:
        try:
            self._on_call(call)
        except Exception as error:
            self._error = error.with_traceback(None)  # which would keep the tensors of the call


_method_patches: list[TensorMethodPatch] = []
