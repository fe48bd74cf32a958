"""An operation that put out a bad number, as the table of causes sees it, and the words in which it speaks of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Sums of products: Inf - Inf can come of finite numbers.
PRODUCTS = ("addmm", "mm", "bmm", "baddbmm", "mv", "dot", "convolution", "mul", "addcmul")
HALF = (torch.float16, torch.bfloat16)


class Told(NamedTuple):
    """What went wrong, in words."""

    key: str
    cause: str
    fix: str


@dataclass(frozen=True, slots=True)
class Case:
    """An operation that put out a bad number, with what it was given, as that was before."""

    operation: str  # the arithmetic: "log", "div", "softmax"
    output: Tensor
    given: Mapping[str, Tensor]  # tensors by the name of their argument, the first being "input"
    numbers: Mapping[str, Any] = field(default_factory=dict)  # the other arguments
    made_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # for each tensor the operations behind it, nearest first
    called: str = ""  # what the user called, where that is another name

    @property
    def input(self) -> Tensor:
        return next(iter(self.given.values()), self.output)

    def other(self, name: str) -> Tensor | None:
        """An argument as a tensor, also where a plain number was given."""
        if name in self.given:
            return self.given[name]
        number = self.numbers.get(name)
        return torch.tensor(float(number), dtype=torch.float64) if isinstance(number, (int, float)) else None

    def comes_from(self, *operations: str) -> str:
        """The first of these operations that an input was made by, else ""."""
        return next((name for behind in self.made_by.values() for name in behind if name in operations), "")

    @property
    def name(self) -> str:
        return self.called or self.operation


def count(mask: Tensor) -> int:
    return int(torch.count_nonzero(mask))


def among(num: int, tensor: Tensor, what: str) -> str:
    """`12 zeros among 320 values`."""
    if what.startswith("values"):
        return f"{num:,} of {tensor.numel():,} {what}"
    thing = what if num != 1 else what.removesuffix("s")
    return f"{num:,} {thing}" if tensor.numel() == num == 1 else f"{num:,} {thing} among {tensor.numel():,} values"


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def largest(tensor: Tensor) -> float:
    """The largest finite absolute value."""
    return float(tensor.detach().double().abs().nan_to_num(0.0, 0.0, 0.0).amax()) if tensor.numel() else 0.0


def remedy_of_log(case: Case) -> str:
    """What to do about a logarithm of 0 depends on where the 0 came from."""
    if case.comes_from("softmax"):
        return "use F.log_softmax(logits) (or cross_entropy on the logits) instead of the log of a softmax, which rounds to 0"
    if case.comes_from("sigmoid"):
        return "use F.logsigmoid or F.binary_cross_entropy_with_logits on the logits: a saturated sigmoid is exactly 0 or 1"
    if case.comes_from("uniform", "rand", "rand_like"):
        return "uniform samples can be exactly 0 (and -log(u) exactly 0): clamp them away from 0 and 1, or use F.gumbel_softmax"
    return "add a small constant or clamp(min=1e-8) before the logarithm"
