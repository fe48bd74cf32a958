"""What is kept of the step under way, so that it can be looked at again should a number in it turn out bad.

References, never copies: the inputs of the last few forwards, the state of the generator as each began, and the user's function that called
backward. All of it goes when the step ends, so nothing outlives the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sonde.capture.call_site import called_by_library, user_frame
from sonde.spike_detection import Leap

MAX_CALLS = 8  # forwards of one step: a longer accumulation is looked at by its last ones


class ForwardCall(NamedTuple):
    """A forward of a root model."""

    model: str  # the name of the watched model; "" for the first
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rng: Tensor  # of the CPU, as the forward began; in a model that did not draw until a moment ago it may be that of up to four before


def called(model: str, module: nn.Module, args: Any, kwargs: Any) -> ForwardCall:
    """A forward that begins now."""
    return ForwardCall(model, module, args, kwargs, torch.get_rng_state())


class ReplayBuffer:
    __slots__ = (
        "backward_frame",
        "blamed_batch",
        "calls",
        "library_calls_backward",
        "loss_frame",
        "on_bad",
        "on_bad_evaluation",
        "on_skip",
        "on_spike",
        "rng",
        "rng_due",
        "scaled",
        "step",
        "where",
    )  # fmt: skip

    def __init__(self) -> None:
        self.calls: deque[ForwardCall] = deque(maxlen=MAX_CALLS)
        # That called backward last. It may have returned by the time that an optimizer finds its gradients bad: only here it is still
        # to be had, with its variables. It goes when they have been looked at, or with the next forward.
        self.backward_frame: FrameType | None = None
        # Where a library calls backward: the user's function that it called before, which made the loss and has returned it. It goes when
        # the loss has been looked at: its variables must not be in memory during backward.
        self.library_calls_backward = False
        self.blamed_batch: Any = None  # of gradients that are added up: the micro-batch that a look-back found, until the alarm is over
        self.loss_frame: FrameType | None = None
        self.on_bad: Callable[[str, Tensor | None], None] = lambda what, loss: None  # what: "loss" or "gradient"
        # Of a forward in evaluation: the call, the step, and whether its output holds no NaN but only Inf. Answers whether it is bad.
        self.on_bad_evaluation: Callable[[ForwardCall, int, bool], bool] = lambda call, step, only_inf: not only_inf
        # "loss" or "gradient", its series, how far above the usual, the step.
        self.on_spike: Callable[[str, str, Leap, int], None] = lambda what, where, leap, step: None
        # A GradScaler holds back the optimizer of these parameters: the step, the scale, what the scaler will multiply it with.
        self.on_skip: Callable[[list[Tensor], int, float, float], None] = lambda parameters, step, scale, backoff: None
        # The native kernel's alone: the random state when it last asked, and for how many forwards it believes that; below 0, for how
        # many it will not find out whether it could.
        self.rng: Tensor | None = None
        self.rng_due = 0
        # Told together with a bad number:
        self.step = 0
        self.where = ""  # the series of the loss, or the parameter whose gradient it is
        self.scaled = False  # a GradScaler multiplied the loss

    def forward(self, model: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.backward_frame = None
        self.calls.append(called(model, module, args, kwargs))

    def left(self) -> None:
        """That forward is over."""
        if self.library_calls_backward:
            self.loss_frame = called_by_library(user_frame())

    def tell(self, what: str, where: str, tensor: Tensor, *, step: int, scaled: bool) -> None:
        """The loss or a gradient turned out bad."""
        self.step, self.where, self.scaled = step, where, scaled
        self.on_bad(what, tensor if what == "loss" else None)

    def clear(self) -> None:
        self.calls.clear()
        self.backward_frame = self.loss_frame = None
