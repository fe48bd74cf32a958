"""The batch of the current step: the tensors that the step takes as inputs, and selections of their samples."""

from typing import Any

import torch
from torch import Tensor, nn

from sonde.replay.earlier_micro_batches import map_tensors
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

    def select(tensor: Tensor) -> Tensor:
        if dim and tensor.dim() > dim and tensor.shape[dim] == num and not tensor.requires_grad:
            return tensor.index_select(dim, samples.to(tensor.device))
        if not tensor.dim() or tensor.requires_grad or tensor.shape[0] < num or tensor.shape[0] % num:
            return tensor
        indexes_dataset = isinstance(flat, Tensor) and flat.dim() > 0 and len(flat) not in (num, len(samples))  # not the batch
        if not indexes_dataset and _is_arange(tensor, num):
            return tensor[: len(samples)]
        per_sample = tensor.shape[0] // num
        if per_sample > 1 and (flat is False or tensor.dim() > 1):
            return tensor
        rows = (samples.to(tensor.device)[:, None] * per_sample + torch.arange(per_sample, device=tensor.device)).reshape(-1)
        return tensor.index_select(0, rows)

    return map_tensors(select, value)


def _is_arange(value: Tensor, num: int) -> bool:
    """Whether it is 0, 1, 2 …, the positions in the batch that contrastive losses use as labels. A smaller batch has fewer of them."""
    if value.dim() != 1 or value.shape[0] != num or value.is_floating_point() or value.dtype == torch.bool:
        return False
    return torch.equal(value, torch.arange(num, dtype=value.dtype, device=value.device))
