"""The models of the script, inside a trial: what is called from outside any other module, with something in it that learns.

Each is met at its first call, before it computes anything. A change is put around its calls through the slot that `Module.compile()` uses
(`_compiled_call_impl`): copies and pickles of the model do not inherit it, and no hook is needed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import FrameType
from typing import Any

import torch
from torch import nn

from sonde.capture.call_site import user_frame
from sonde.statistics.tensor_utils import find_tensors
from sonde.statistics.torch_internals import call_implementation, is_compiled, replace_call_implementation, tree_map_only
from sonde.tuning.call_site_keys import place_here
from sonde.tuning.messages import Model

STEPS_SEARCHED = 3  # by then every model that is trained has run


class Models:
    def __init__(self, changes: Sequence[str], num_expected: int) -> None:
        self._changes, self._num_expected = frozenset(changes), num_expected
        self._met: dict[int, tuple[nn.Module, Model]] = {}
        self._original: Any = None
        self._thread = threading.local()

    @property
    def is_searching(self) -> bool:
        return self._original is not None

    def install(self) -> None:
        original = self._original = nn.Module.__call__

        @functools.wraps(original)
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._thread, "inside", False) or not torch.is_grad_enabled() or not _learns(module):
                return original(module, *args, **kwargs)
            self._meet(module, args, kwargs)
            self._thread.inside = True
            try:
                return original(module, *args, **kwargs)
            finally:
                self._thread.inside = False

        nn.Module.__call__ = __call__  # type: ignore[method-assign]

    def step_ended(self, num_steps: int) -> None:
        if num_steps >= STEPS_SEARCHED:
            self._stop_searching()

    def facts(self) -> tuple[Model, ...]:
        return tuple(model for _, model in self._met.values())

    def _stop_searching(self) -> None:
        if self._original is not None:
            nn.Module.__call__ = self._original  # type: ignore[method-assign]
            self._original = None

    def _meet(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if id(module) in self._met:
            return
        self._met[id(module)] = module, _facts(module, args, kwargs)
        if self._changes:
            if "channels_last" in self._changes:
                module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's own stub forgets it
            replace_call_implementation(module, self._changed(module))
        if len(self._met) == self._num_expected:
            self._stop_searching()

    def _changed(self, module: nn.Module) -> Callable[..., Any]:
        plain = call_implementation(module)
        device = _device(module)
        images, half, compiles = (name in self._changes for name in ("channels_last", "autocast", "compile"))
        compiled: Callable[..., Any] | None = None

        def inner(*args: Any, **kwargs: Any) -> Any:
            return plain(*args, **kwargs)  # torch leaves its own files uncompiled, and `plain` of a Sequential is in one of them

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal compiled
            if images:
                args, kwargs = tree_map_only(torch.Tensor, _as_channels_last, (args, kwargs))
            # The compiler must not meet a Module.__call__ of ours: it begins once the search is over.
            if compiles and compiled is None and not self.is_searching:
                compiled = torch.compile(inner)
            with torch.autocast(device, torch.bfloat16) if half else nullcontext():
                output = (compiled or plain)(*args, **kwargs)
            return tree_map_only(torch.Tensor, _as_float32, output) if half else output

        return call


def _as_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _as_float32(tensor: torch.Tensor) -> torch.Tensor:
    """The loss is computed outside, in float32, as it is where autocast reaches around it."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _learns(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _device(module: nn.Module) -> str:
    return str(next(module.parameters()).device.type)


def _facts(module: nn.Module, args: Any, kwargs: Any) -> Model:
    device = _device(module)
    images = [tensor for _, tensor in find_tensors((args, kwargs)) if tensor.dim() == 4 and tensor.is_floating_point()]
    stored_last = (not each.is_contiguous() and each.is_contiguous(memory_format=torch.channels_last) for each in images)
    return Model(
        place=place_here(),
        name=_name_of(module, user_frame()),
        kind=type(module).__name__,
        device=device,
        is_float32=all(p.dtype == torch.float32 for p in module.parameters() if p.is_floating_point()),
        num_conv2d=sum(isinstance(part, nn.Conv2d) for part in module.modules()),
        takes_images=bool(images),
        is_channels_last=bool(images) and all(stored_last),
        in_autocast=torch.is_autocast_enabled(device),
        is_compiled=is_compiled(module),
    )


def _name_of(module: nn.Module, frame: FrameType | None) -> str:
    """What the user calls it where it is called: a variable, or an attribute of `self`."""
    if frame is not None:
        owner = frame.f_locals.get("self")
        for prefix, scope in (("", frame.f_locals), ("self.", getattr(owner, "__dict__", {})), ("", frame.f_globals)):
            for name, value in list(scope.items()):
                if value is module:
                    return f"{prefix}{name}"
    return "model"
