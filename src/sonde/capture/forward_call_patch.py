"""Observes the forwards of modules, without anything on the modules themselves.

`watch_forward` observes single modules, by a descriptor on their classes. `hook_all_modules` observes all modules of the process, by
torch's global hooks. A forked child watches no single modules.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from sonde.capture.monkeypatch import hide_from_warnings
from sonde.capture.training_callbacks import TrainingCallbacks, is_suspended
from sonde.statistics.private_torch_api import compiled_wrapper, skip_in_dynamo, tracing_state, unwrap_compiled

DEEP = 100  # modules inside of each other: with fewer, Python's recursion limit is far away
FRAMES_PER_MODULE = 3  # the least that a call of a module takes of Python's stack. A global hook adds one
HOOK_FRAMES = 100  # more than a callback of Sonde needs


class WatchedCall:
    """Stands for `__call__` on a class of modules and calls back for the watched instances; other instances pass. Nothing is put on an
    instance, so a watched module is traced, scripted, saved, copied and compiled as if it were not watched."""

    def __init__(self, owner: type[nn.Module]) -> None:
        self.owner: Any = owner
        self.original = owner.__dict__.get("__call__")  # None: inherited
        self._is_compiled_wrapper = owner is compiled_wrapper()
        self.entries: dict[int, tuple[weakref.ref[nn.Module], tuple[TrainingCallbacks, ...]]] = {}
        self.deep: set[int] = set()  # ids of the watched modules with many modules inside of each other

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        # The next `__call__` is looked up at every call, since torch.fx patches that of nn.Module.
        if self.original is not None:
            plain = self.original.__get__(module, owner) if hasattr(type(self.original), "__get__") else self.original
        else:
            plain = super(self.owner, module if module is not None else owner or self.owner).__call__  # type: ignore[misc]
        if module is None or (not self._is_compiled_wrapper and id(module) not in self.entries):
            return plain
        watched, callbacks = self._find(module)
        if not callbacks:
            return plain
        return functools.partial(_call_deep if id(module) in self.deep else _call_watched, plain, watched, callbacks)

    def callbacks_of(self, module: nn.Module) -> tuple[TrainingCallbacks, ...]:
        entry = self.entries.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else ()

    def _find(self, module: nn.Module) -> tuple[nn.Module, tuple[TrainingCallbacks, ...]]:
        """The watched module that this call is a forward of (it may be inside of torch.compile's wrapper), and whom to call."""
        if callbacks := self.callbacks_of(module):
            return module, callbacks
        inner = unwrap_compiled(module) if self._is_compiled_wrapper else None
        watched = next((_watched_classes[kind] for kind in type(inner).__mro__ if kind in _watched_classes), None)
        return watched._find(inner) if inner is not None and watched is not None else (module, ())

    def __reduce__(self) -> Any:
        """Copied and pickled with its class as the `__call__` that it stands for."""
        return (getattr, (nn.Module, "__call__")) if self.original is None else (operator.itemgetter(0), ((self.original,),))


def _call_watched(plain: Any, module: nn.Module, callbacks: tuple[TrainingCallbacks, ...], /, *args: Any, **kwargs: Any) -> Any:
    if is_compiling() or tracing_state() is not None or is_suspended():
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


def _call_deep(*args: Any, **kwargs: Any) -> Any:
    """The frames of Sonde around a script, and those of its hooks, must not bring a deep model to the recursion limit."""
    with deeper_stack():
        return _call_watched(*args, **kwargs)


for _function in (_call_watched, _call_deep):
    hide_from_warnings(_function)
    skip_in_dynamo(_function, recursive=False)

_watched_classes: dict[type, WatchedCall] = {}


def _watch_class(owner: type[nn.Module]) -> WatchedCall:
    watched = owner.__dict__.get("__call__")
    if not isinstance(watched, WatchedCall):
        watched = _watched_classes[owner] = WatchedCall(owner)
        owner.__call__ = watched  # type: ignore[method-assign,assignment]
    return watched


def watch_compiled_wrappers() -> None:
    """A call of torch.compile's wrapper is a forward of the module inside, which the wrapper calls past its class."""
    wrapper = compiled_wrapper()
    if wrapper is not None and _watched_classes:
        _watch_class(wrapper)


def watch_forward(module: nn.Module, callbacks: TrainingCallbacks) -> None:
    """Call `on_forward_start` and `on_forward_end` for this module from now on."""
    watched = _watch_class(type(module))
    watch_compiled_wrappers()
    others = watched.callbacks_of(module)
    if callbacks not in others:
        watched.entries[id(module)] = (weakref.ref(module), (*others, callbacks))
    if any(path.count(".") >= DEEP for path, _ in module.named_modules()):
        watched.deep.add(id(module))
    else:
        watched.deep.discard(id(module))


def is_forward_watched(module: nn.Module, callbacks: TrainingCallbacks) -> bool:
    """Whether a call of this module is seen: a lazy module becomes one of another class, and some code replaces `__call__` of a class."""
    for kind in type(module).__mro__:
        found = vars(kind).get("__call__")
        if isinstance(found, WatchedCall) and callbacks in found.callbacks_of(module):
            return True
        if found is not None and not (isinstance(found, WatchedCall) and found.original is None):
            return False  # this `__call__` hides those of the base classes
    return False


def unwatch_forward(module: nn.Module, callbacks: TrainingCallbacks) -> None:
    """Undo `watch_forward`; the last one of a class restores its `__call__`."""
    for watched in list(_watched_classes.values()):
        if known := watched.callbacks_of(module):
            watched.entries[id(module)] = (weakref.ref(module), tuple(other for other in known if other is not callbacks))
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


@contextlib.contextmanager
def deeper_stack() -> Iterator[None]:
    """Inside, Python's recursion limit is higher by what global hooks add: the deepest model that runs without them runs with them. Endless
    recursion still ends with a RecursionError."""
    global _num_deeper, _limits
    if _num_deeper == 0:
        limit = sys.getrecursionlimit()
        if limit != _limits[1]:  # else it could not be lowered the last time
            _limits = (limit, limit + limit // FRAMES_PER_MODULE + HOOK_FRAMES)
            sys.setrecursionlimit(_limits[1])
    _num_deeper += 1
    try:
        yield
    finally:
        _num_deeper -= 1
        if _num_deeper == 0 and sys.getrecursionlimit() == _limits[1]:  # else the user has set another
            with contextlib.suppress(RecursionError):
                sys.setrecursionlimit(_limits[0])
                _limits = (0, 0)


_num_deeper = 0
_limits = (0, 0)  # the user's, and the higher one that is set


def hook_all_modules(*, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None) -> Callable[[], None]:
    """Hooks on the forward of every module of this process; the answer removes them. They slow all modules down, so for one forward or a
    short search only. Each takes a frame of the stack, see `deeper_stack`. A hook must not remove hooks where the forward failed: torch
    goes through them then."""
    handles = [register_module_forward_pre_hook(before)] if before is not None else []
    if after is not None:
        handles.append(register_module_forward_hook(after, always_call=before is not None))

    def remove() -> None:
        while handles:
            handles.pop().remove()

    return remove


class UncopiedHook:
    """Base of hooks whose copies and pickles are a function of the standard library that does nothing: a copy of a hooked module is not
    hooked, and loads where Sonde is not installed."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __deepcopy__(self, memo: Any) -> Any:
        return contextlib.nullcontext().__exit__


def _clear_in_child() -> None:
    for watched in list(_watched_classes.values()):
        watched.entries.clear()


os.register_at_fork(after_in_child=_clear_in_child)
