"""A torch hook for models that belong to the user: it never raises, never changes a value and is not copied with the model."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from sonde.capture.forward_call_patch import UncopiedHook
from sonde.statistics.private_torch_api import tracing_state

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
