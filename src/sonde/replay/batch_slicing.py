"""The batch of the current step: the tensors that the step takes as inputs, and selections of their samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sonde.replay.rerun_statements import Rerun
from sonde.statistics.find_tensors import find_tensors


def step_inputs(rerun: Rerun) -> list[Tensor]:
    """The tensors that the step takes as inputs (batch, labels); inputs of the model come first."""
    found = {id(tensor): tensor for call in rerun.calls for _, tensor in find_tensors((call.args, call.kwargs))}
    for part in rerun.slices if rerun.earlier is None else ():  # the labels of an earlier micro-batch are not stored
        for name in sorted(part.slice.inputs):
            value = part.variables.get(name)
            if not isinstance(value, nn.Module):
                found |= {id(tensor): tensor for _, tensor in find_tensors(value)}
    return [tensor for tensor in found.values() if tensor.dim() and not tensor.requires_grad]


def select_samples(value: Any, samples: Tensor, num: int, dim: int, *, flat: Any) -> Any:
    """`value` with some samples of every tensor that has the size of the batch.

    Args:
        samples: indices in the batch.
        num: size of the batch.
        dim: dimension of the samples.
        flat: whether a tensor may be a flattened batch of sequences, with a multiple of `num` rows. A tensor here means True, and that
            `value` is an index into it.
    """
    if isinstance(value, Tensor):
        if dim and value.dim() > dim and value.shape[dim] == num and not value.requires_grad:
            return value.index_select(dim, samples.to(value.device))
        if not value.dim() or value.requires_grad or value.shape[0] < num or value.shape[0] % num:
            return value
        indexes_dataset = isinstance(flat, Tensor) and flat.dim() > 0 and len(flat) not in (num, len(samples))  # not the batch
        if not indexes_dataset and _is_arange(value, num):
            return value[: len(samples)]
        flat = flat is not False
        per_sample = value.shape[0] // num
        if per_sample > 1 and (not flat or value.dim() > 1):
            return value
        rows = (samples.to(value.device)[:, None] * per_sample + torch.arange(per_sample, device=value.device)).reshape(-1)
        return value.index_select(0, rows)
    if isinstance(value, dict):
        return {key: select_samples(item, samples, num, dim, flat=flat) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(select_samples(item, samples, num, dim, flat=flat) for item in value)
    return value


def _is_arange(value: Tensor, num: int) -> bool:
    """Whether it is 0, 1, 2 …, the positions in the batch that contrastive losses use as labels. A smaller batch has fewer of them."""
    if value.dim() != 1 or value.shape[0] != num or value.is_floating_point() or value.dtype == torch.bool:
        return False
    return torch.equal(value, torch.arange(num, dtype=value.dtype, device=value.device))
