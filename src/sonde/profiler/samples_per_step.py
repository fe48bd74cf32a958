"""How many samples a step works on, by what goes into its outermost modules and by what its loaders gave.

A module may see the same samples many times in a step: the cell of a recurrent net, the discriminator of a GAN, the two halves of a pair.
Several batches in one step are several only where each has a backward of its own and one update follows them all: that is accumulation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from sonde.statistics.tensor_utils import find_tensors


class Batch(NamedTuple):
    """What went into an outermost module."""

    num_samples: int
    num_tokens: int | None
    text: str
    backward: int = 0  # how many backwards and updates the step had had before
    update: int = 0


class Seen(NamedTuple):
    """What a step worked on."""

    num_samples: int | None
    num_tokens: int | None
    text: str


def batch_of(args: Any, kwargs: Any) -> Batch | None:
    """By the first tensor: its first dimension counts samples, and whole numbers in two dimensions are tokens."""
    tensors = [tensor for _, tensor in find_tensors((args, kwargs)) if tensor.dim() > 0]
    if not tensors:
        return None
    shapes = [f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in tensors]
    first = tensors[0]
    is_tokens = first.dim() == 2 and not first.is_floating_point() and not first.is_complex() and first.dtype != torch.bool
    more = f" and {len(shapes) - 3} more" if len(shapes) > 3 else ""
    return Batch(first.shape[0], first.numel() if is_tokens else None, ", ".join(shapes[:3]) + more)


def seen_in(modules: Iterable[list[Batch]], num_fetched: int = 0) -> Seen:
    """The calls of each outermost module in one step, and how many samples loaders gave in it (0: no loader was seen)."""
    counted = [_counted(calls) for calls in modules]
    most = max(counted, key=lambda calls: sum(call.num_samples for call in calls), default=[])
    if not most:
        return Seen(None, None, "")
    num_samples = sum(call.num_samples for call in most)
    tokens = [call.num_tokens for call in most if call.num_tokens is not None]
    text = most[0].text if len(most) == 1 else f"{len(most)} x {most[0].text}"
    # A validation in between fetches too, and then it is more than the model was given.
    return Seen(min(num_samples, num_fetched or num_samples), sum(tokens) if len(tokens) == len(most) else None, text)


def _counted(calls: list[Batch]) -> list[Batch]:
    """The largest call before each backward, of the update that took most."""
    updates: dict[int, dict[int, Batch]] = {}
    for call in calls:
        backwards = updates.setdefault(call.update, {})
        largest = backwards.get(call.backward)
        if largest is None or call.num_samples > largest.num_samples:
            backwards[call.backward] = call
    return max((list(each.values()) for each in updates.values()), key=lambda each: sum(call.num_samples for call in each), default=[])
