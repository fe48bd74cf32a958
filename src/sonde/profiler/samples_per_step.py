"""Number of samples and tokens of a step, from the inputs of its outermost modules and from the batches of its data loaders.

A module may receive the same samples several times in a step (the cell of a recurrent net, the discriminator of a GAN). Several batches
count as several only if each has its own backward and one update follows all of them: gradient accumulation.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from sonde.formatting import listing
from sonde.statistics.find_tensors import find_tensors


class InputBatch(NamedTuple):
    """The inputs of one call of an outermost module."""

    num_samples: int
    num_tokens: int | None
    text: str
    num_backwards: int = 0  # in this step, before the call
    num_updates: int = 0


class StepSamples(NamedTuple):
    """The samples of one step."""

    num_samples: int | None
    num_tokens: int | None
    text: str


def input_batch(args: Any, kwargs: Any) -> InputBatch | None:
    """Describes the inputs of a call. The first dimension of the first tensor counts samples; integers in two dimensions are tokens."""
    tensors = [tensor for _, tensor in find_tensors((args, kwargs)) if tensor.dim() > 0]
    if not tensors:
        return None
    shapes = [f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in tensors]
    first = tensors[0]
    is_tokens = first.dim() == 2 and not first.is_floating_point() and not first.is_complex() and first.dtype != torch.bool
    return InputBatch(first.shape[0], first.numel() if is_tokens else None, listing(shapes))


def samples_per_step(modules: Iterable[list[InputBatch]], num_fetched: int = 0) -> StepSamples:
    """The samples of a step. `modules` are the calls of each outermost module in it, `num_fetched` counts the samples from data loaders (0:
    no loader was used)."""
    counted = [_counted(calls) for calls in modules]
    largest = max(counted, key=lambda calls: sum(call.num_samples for call in calls), default=[])
    if not largest:
        return StepSamples(None, None, "")
    num_samples = sum(call.num_samples for call in largest)
    tokens = [call.num_tokens for call in largest if call.num_tokens is not None]
    text = largest[0].text if len(largest) == 1 else f"{len(largest)} x {largest[0].text}"
    # A validation between two steps fetches batches as well: then more were fetched than the model was trained on.
    return StepSamples(min(num_samples, num_fetched or num_samples), sum(tokens) if len(tokens) == len(largest) else None, text)


def _counted(calls: list[InputBatch]) -> list[InputBatch]:
    """The largest call before each backward, for the update with the most samples."""
    updates: dict[int, dict[int, InputBatch]] = {}
    for call in calls:
        backwards = updates.setdefault(call.num_updates, {})
        largest = backwards.get(call.num_backwards)
        if largest is None or call.num_samples > largest.num_samples:
            backwards[call.num_backwards] = call
    return max((list(each.values()) for each in updates.values()), key=lambda each: sum(call.num_samples for call in each), default=[])
