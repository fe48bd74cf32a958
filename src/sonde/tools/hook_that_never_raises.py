"""For models of the user: a torch hook that never raises, never changes a value and is not copied with the model; and a type check."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sonde.capture.forward_call_patch import UncopiedHook
from sonde.errors import SondeError
from sonde.statistics.private_torch_api import tracing_state, unwrap_compiled

_log = logging.getLogger("sonde")


class SafeHook(UncopiedHook):
    """Calls a function with the arguments of a torch hook, always returns None, and disables itself after the first exception."""

    __slots__ = ("_call", "_name", "is_disabled")

    def __init__(self, name: str, call: Callable[..., object]) -> None:
        """`name` is the subject of the warning, for instance "the output of encoder.0"."""
        self._name, self._call = name, call
        self.is_disabled = False

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling() or tracing_state() is not None or self.is_disabled:
            return
        try:
            self._call(*args, **kwargs)
        except Exception as error:
            self.is_disabled = True
            _log.warning("%s is not observed any more: %s: %s", self._name, type(error).__name__, error)


def require_module(model: object, caller: str, advice: str = "") -> nn.Module:
    """Returns the module, for a compiled one the module before torch.compile. Raises a `SondeError` for another type."""
    if not isinstance(model, nn.Module):
        raise SondeError(f"{caller} takes a torch.nn.Module, not a {type(model).__name__}.{' ' if advice else ''}{advice}")
    return unwrap_compiled(model) or model
