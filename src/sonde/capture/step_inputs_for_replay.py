"""What is stored of the step that is under way, so that it can be run again should a number in it turn out bad.

References, never copies: the inputs of the last forwards, the state of the random generator as each began, and the user's function that
called backward. All of it is released when the step ends, so nothing outlives the step.
"""

import weakref
from collections import deque
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sonde.capture.user_source_line import called_by_library, user_frame
from sonde.statistics.private_torch_api import tensor_version

MAX_CALLS = 8  # forwards of one step: of a longer accumulation the last ones


class ForwardCall(NamedTuple):
    """A forward of a root model."""

    model: str  # the name of the watched model; "" for the first
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rng: Tensor  # state of the CPU's generator as the forward began


class ReplayBuffer:
    """The forwards of the running step and the frames that make its loss and call its backward."""

    __slots__ = ("_last_input", "backward_frame", "blamed_batch", "calls", "loss_frame", "scaled", "step", "where")

    def __init__(self) -> None:
        self.calls: deque[ForwardCall] = deque(maxlen=MAX_CALLS)
        # Called backward last. It may have returned by the time that an optimizer finds its gradients bad: only here its variables are
        # still to be had. Released when they have been checked, or with the next forward.
        self.backward_frame: FrameType | None = None
        # Where a library calls backward: the user's function that made the loss and has returned it. Released before backward, during
        # which its variables must not be in memory.
        self.loss_frame: FrameType | None = None
        self.blamed_batch: Any = None  # of accumulated gradients: the micro-batch that a replay found, until the incident is over
        self._last_input: tuple[weakref.ref[Tensor], int] | None = None  # of the step before: its first tensor, and how often written
        # Set with a bad number:
        self.step = 0
        self.where = ""  # the series of the loss, or the parameter whose gradient it is
        self.scaled = False  # a GradScaler scaled the loss

    def on_forward_start(self, model: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.backward_frame = None
        self.calls.append(ForwardCall(model, module, args, kwargs, torch.get_rng_state()))

    def on_forward_end(self, *, library_calls_backward: bool) -> None:
        if library_calls_backward:
            self.loss_frame = called_by_library(user_frame())

    @property
    def _first_input(self) -> Tensor | None:
        first = self.calls[-1].args[0] if self.calls and self.calls[-1].args else None
        return first if isinstance(first, Tensor) else None

    @property
    def has_same_batch(self) -> bool:
        """Whether the model was called with the very tensor of the step before: a training on one fixed batch."""
        if self._last_input is None:
            return False
        first, (last, version) = self._first_input, self._last_input
        return first is not None and first is last() and tensor_version(first) == version

    def clear(self) -> None:
        first = self._first_input
        self._last_input = None if first is None else (weakref.ref(first), tensor_version(first))
        self.calls.clear()
        self.backward_frame = self.loss_frame = None
