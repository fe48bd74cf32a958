"""A model under watch: its leaves, the names of its parameters, and the two hooks at its door.

Only the door is hooked all the time. The leaves are hooked from the moment a forward enters until it leaves, and only on observed
steps: so an unobserved step runs at full speed, recomputation in activation checkpointing is not mistaken for a forward, and a model
that is saved or copied between steps carries no hook on its leaves.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from sonde.capture.dynamo import answered_natively, inside

ENTRY = Callable[["Watched", nn.Module, Any, Any], None]
EXIT = Callable[["Watched", nn.Module, Any], None]

COMPILED = "inside torch.compile the outputs of layers are not measured; parameters, gradients and updates are"
SCRIPTED = "inside torch.jit.script the outputs of layers are not measured; parameters, gradients and updates are"

# Modules that compute with their children's parameters themselves: their own output is what there is to see.
_COMPUTES_ITSELF = (nn.MultiheadAttention,)


class InertCopy:
    """A hook that does not travel: its copies and pickles are a standard-library function that does nothing, so a copy of a watched model
    is not watched and loads where Sonde is not installed."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __deepcopy__(self, memo: Any) -> Any:
        return contextlib.nullcontext().__exit__


@answered_natively("enters")
class _Entering(InertCopy):
    __slots__ = ("call", "watched")

    def __init__(self, watched: Watched, call: ENTRY) -> None:
        self.watched, self.call = watched, call

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        # Without kwargs: taken off since torch listed the hooks of this call, by a hook of the user's, a signal or another thread.
        if kwargs is None or is_compiling():
            return
        self.call(self.watched, module, args, kwargs)


@answered_natively("leaves")
class _Leaving(InertCopy):
    __slots__ = ("call", "watched")

    def __init__(self, watched: Watched, call: EXIT) -> None:
        self.watched, self.call = watched, call

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_compiling():
            return
        self.call(self.watched, module, output)


class Watched:
    __slots__ = ("__dict__", "__weakref__", "doors_used", "ever_entered", "name")  # see beat.py

    def __init__(self, name: str, model: nn.Module, entering: ENTRY, leaving: EXIT) -> None:
        self.name = name
        self._model = weakref.ref(model)
        self._entering, self._leaving = entering, leaving
        self._handles: dict[int, tuple[weakref.ref[nn.Module], list[Any]]] = {}
        self.compiled = is_compiled(model)
        self.doors_used: set[int] = set()  # ids of the modules through which it was entered since the last step began
        self.ever_entered = False
        self.version = 0  # counts up when modules may have changed: whoever planned with them plans again
        self._excluded: set[int] = set()  # ids of modules that are about to be compiled

    @property
    def model(self) -> nn.Module | None:
        return self._model()

    @property
    def body(self) -> nn.Module | None:
        """The module whose paths the user knows: without the wrapper of torch.compile."""
        model = self._model()
        return model if (within := inside(model)) is None else within

    def add_entry(self, module: nn.Module) -> None:
        """Hook a door: the model itself, or a part of it that the user calls directly."""
        if self.has_entry(module):
            return
        handles = [
            module.register_forward_pre_hook(_Entering(self, self._entering), with_kwargs=True),
            module.register_forward_hook(_Leaving(self, self._leaving), always_call=True),
        ]
        self._handles[id(module)] = (weakref.ref(module), handles)

    def has_entry(self, module: nn.Module) -> bool:
        known = self._handles.get(id(module))
        return known is not None and known[0]() is module

    def remove_entries(self) -> None:
        for _, handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()

    def holds(self, module: nn.Module) -> bool:
        model = self._model()
        return model is not None and any(module is other for other in model.modules())

    def exclude(self, module: nn.Module) -> bool:
        """A part that is being compiled: what is put on it would compile it again, so it is left alone. False: that is known already."""
        if id(module) in self._excluded:
            return False
        self._excluded.update(id(other) for other in module.modules())
        self.compiled = self.compiled or module is self._model()
        self.version += 1
        return True

    def leaves(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules whose output is measured: those without children, and those that hold parameters of their own."""
        body = self.body
        if body is None or self.compiled or isinstance(self._model(), nn.DataParallel):
            return  # replicas share attributes with their original: what is put there for one would run in all
        compiled: list[str] = []  # prefixes of parts compiled on their own
        for path, module in body.named_modules():
            if is_compiled(module):
                compiled.append(f"{path}.")
            hidden = id(module) in self._excluded or f"{path}.".startswith(tuple(compiled))
            if hidden or "parametrizations" in path.split(".") or isinstance(module, torch.jit.ScriptModule):
                continue
            if not module._modules or module._parameters or isinstance(module, _COMPUTES_ITSELF):
                yield path, module

    def hidden_parts(self) -> Iterator[tuple[str, str]]:
        """Parts whose inside is not measured, and why, without what is inside of them. The path of the whole model is empty."""
        body = self.body
        if body is None:
            return
        if self.compiled:
            yield "", COMPILED
        elif isinstance(body, nn.DataParallel):
            yield "", "nn.DataParallel runs copies of the layers, whose outputs are not measured; parameters, gradients and updates are"
        else:
            outer: list[str] = []
            for path, module in body.named_modules():
                reason = COMPILED if is_compiled(module) else SCRIPTED if isinstance(module, torch.jit.ScriptModule) else ""
                if reason and not f"{path}.".startswith(tuple(outer)):
                    outer.append(f"{path}.")
                    yield path, reason

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        body = self.body
        if body is not None:
            yield from body.named_parameters()

    def mode_modules(self) -> list[nn.Module]:
        """Modules that behave differently in eval: dropout and normalisation with running statistics."""
        body = self.body
        return [] if body is None else [module for module in body.modules() if depends_on_mode(module)]


def is_compiled(module: nn.Module) -> bool:
    return inside(module) is not None or getattr(module, "_compiled_call_impl", None) is not None


def depends_on_mode(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return bool(module.track_running_stats)
    return isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and module.dropout > 0
