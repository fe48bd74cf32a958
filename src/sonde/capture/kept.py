"""What is kept of the step under way, so that it can be looked at again should a number in it turn out bad.

References, never copies: the inputs of the last few forwards and the state of the generator as each began. All of it goes when the step
ends, so nothing outlives the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

MAX_CALLS = 8  # forwards of one step: a longer accumulation is looked at by its last ones


class Call(NamedTuple):
    """A forward of a root model."""

    model: str  # the name of the watched model; "" for the first
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rng: Tensor  # of the CPU, as the forward began


class Kept:
    __slots__ = ("calls", "on_bad", "scaled", "step", "where")

    def __init__(self) -> None:
        self.calls: deque[Call] = deque(maxlen=MAX_CALLS)
        self.on_bad: Callable[[str, Tensor | None], None] = lambda what, loss: None  # what: "loss" or "gradient"
        # Told together with a bad number:
        self.step = 0
        self.where = ""  # the series of the loss, or the parameter whose gradient it is
        self.scaled = False  # a GradScaler multiplied the loss

    def forward(self, model: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.calls.append(Call(model, module, args, kwargs, torch.get_rng_state()))

    def tell(self, what: str, where: str, tensor: Tensor, *, step: int, scaled: bool) -> None:
        """The loss or a gradient turned out bad."""
        self.step, self.where, self.scaled = step, where, scaled
        self.on_bad(what, tensor if what == "loss" else None)
