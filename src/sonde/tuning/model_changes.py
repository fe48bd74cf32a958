"""Finds and changes the models of the script inside a trial: outermost modules with trainable parameters.

`nn.Module.__call__` is patched for the first steps. A model is changed at its first call, before it computes anything, by the slot that
`Module.compile()` uses: copies and pickles of the model do not inherit the change, and no hook is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import FrameType
from typing import Any

import torch
from torch import nn

from sonde.capture.call_site import user_frame
from sonde.capture.monkeypatch import override
from sonde.statistics.find_tensors import find_tensors
from sonde.statistics.private_torch_api import call_implementation, is_compiled, replace_call_implementation, tree_map_only
from sonde.tuning.stable_call_site_ids import call_site_here
from sonde.tuning.trial_messages import ModelInfo

STEPS_SEARCHED = 3  # every trained model has run by then


class ModelPatcher:
    """Applies channels_last, autocast and compile to the models that the script calls, and describes them."""

    def __init__(self, changes: Sequence[str], num_expected: int) -> None:
        self._changes, self._num_expected = frozenset(changes), num_expected
        self._models: dict[int, tuple[nn.Module, ModelInfo]] = {}
        self._undo: Callable[[], None] | None = None  # while it searches
        self._thread = threading.local()

    @property
    def is_searching(self) -> bool:
        return self._undo is not None

    def install(self) -> None:
        self._undo = override(nn.Module, "__call__", self._wrap_call)

    def _wrap_call(self, original: Any) -> Any:
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._thread, "inside", False) or not torch.is_grad_enabled() or not _is_trainable(module):
                return original(module, *args, **kwargs)
            self._add(module, args, kwargs)
            self._thread.inside = True
            try:
                return original(module, *args, **kwargs)
            finally:
                self._thread.inside = False

        return __call__

    def on_step_end(self, num_steps: int) -> None:
        if num_steps >= STEPS_SEARCHED:
            self._stop_searching()

    def describe(self) -> tuple[ModelInfo, ...]:
        return tuple(model for _, model in self._models.values())

    def _stop_searching(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def _add(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if id(module) in self._models:
            return
        self._models[id(module)] = module, _describe(module, args, kwargs)
        if self._changes:
            if "channels_last" in self._changes:
                module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stub
            replace_call_implementation(module, self._make_call(module))
        if len(self._models) == self._num_expected:
            self._stop_searching()

    def _make_call(self, module: nn.Module) -> Callable[..., Any]:
        plain = call_implementation(module)
        device = _device(module)
        images, half, compiles = (name in self._changes for name in ("channels_last", "autocast", "compile"))
        compiled: Callable[..., Any] | None = None

        def inner(*args: Any, **kwargs: Any) -> Any:
            return plain(*args, **kwargs)  # torch.compile skips functions in torch's own files, such as `plain` of a Sequential

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal compiled
            if images:
                args, kwargs = tree_map_only(torch.Tensor, _as_channels_last, (args, kwargs))
            # Compiles only after the search: the patched Module.__call__ must not be compiled.
            if compiles and compiled is None and not self.is_searching:
                compiled = torch.compile(inner)
            with torch.autocast(device, torch.bfloat16) if half else nullcontext():
                output = (compiled or plain)(*args, **kwargs)
            return tree_map_only(torch.Tensor, _as_float32, output) if half else output

        return call


def _as_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _as_float32(tensor: torch.Tensor) -> torch.Tensor:
    """The loss is computed outside of autocast, from float32, as losses inside of autocast are."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _is_trainable(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _device(module: nn.Module) -> str:
    return str(next(module.parameters()).device.type)


def _describe(module: nn.Module, args: Any, kwargs: Any) -> ModelInfo:
    device = _device(module)
    images = [tensor for _, tensor in find_tensors((args, kwargs)) if tensor.dim() == 4 and tensor.is_floating_point()]
    stored_last = (not each.is_contiguous() and each.is_contiguous(memory_format=torch.channels_last) for each in images)
    return ModelInfo(
        site=call_site_here(),
        name=_variable_name(module, user_frame()),
        class_name=type(module).__name__,
        device=device,
        is_float32=all(p.dtype == torch.float32 for p in module.parameters() if p.is_floating_point()),
        num_conv2d=sum(isinstance(part, nn.Conv2d) for part in module.modules()),
        takes_images=bool(images),
        is_channels_last=bool(images) and all(stored_last),
        in_autocast=torch.is_autocast_enabled(device),
        is_compiled=is_compiled(module),
    )


def _variable_name(module: nn.Module, frame: FrameType | None) -> str:
    """The variable that holds the model at its call, or the attribute of `self`."""
    if frame is not None:
        owner = frame.f_locals.get("self")
        for prefix, scope in (("", frame.f_locals), ("self.", getattr(owner, "__dict__", {})), ("", frame.f_globals)):
            for name, value in list(scope.items()):
                if value is module:
                    return f"{prefix}{name}"
    return "model"
