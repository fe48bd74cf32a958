"""A hook on somebody else's model: it never raises into the training, never changes what flows, and is not copied with the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from sonde.capture.inert_copy import InertCopy

_log = logging.getLogger("sonde")


class Contained(InertCopy):
    """Calls `call` with what torch gives; always returns None. A call that raises is the last one at this place, and one line says so."""

    __slots__ = ("_call", "_place", "retired")

    def __init__(self, place: str, call: Callable[..., object]) -> None:
        self._place, self._call = place, call
        self.retired = False

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or self.retired:
            return
        try:
            self._call(*args, **kwargs)
        except Exception as error:
            self.retired = True
            _log.warning("%s is not observed any more: %s: %s", self._place, type(error).__name__, error)
