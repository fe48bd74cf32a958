"""The batch of the step under way: what the step was given, and parts of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sonde.replay.rerun import Rerun
from sonde.statistics.tensor_utils import find_tensors


def given_to(rerun: Rerun) -> list[Tensor]:
    """What the step was given: the batch, the labels. What the model took comes first."""
    seen = {id(tensor): tensor for call in rerun.calls for _, tensor in find_tensors((call.args, call.kwargs))}
    for part in rerun.parts if rerun.earlier is None else ():  # the labels of an earlier micro-batch are gone
        for name in sorted(part.slice.given):
            value = part.names.get(name)
            if not isinstance(value, nn.Module):
                seen |= {id(tensor): tensor for _, tensor in find_tensors(value)}
    return [tensor for tensor in seen.values() if tensor.dim() and not tensor.requires_grad]


def picked(value: Any, samples: Tensor, num: int, dim: int, *, flat: Any) -> Any:
    """Some samples of whatever has the size of the batch; flattened sequences have a multiple of it. `flat` may be what the value is an
    index of, in place of True."""
    if isinstance(value, Tensor):
        if dim and value.dim() > dim and value.shape[dim] == num and not value.requires_grad:
            return value.index_select(dim, samples.to(value.device))
        if not value.dim() or value.requires_grad or value.shape[0] < num or value.shape[0] % num:
            return value
        places = isinstance(flat, Tensor) and flat.dim() > 0 and len(flat) not in (num, len(samples))  # in a dataset, not in the batch
        if not places and _counts(value, num):
            return value[: len(samples)]
        flat = flat is not False
        per_sample = value.shape[0] // num
        if per_sample > 1 and (not flat or value.dim() > 1):
            return value
        rows = (samples.to(value.device)[:, None] * per_sample + torch.arange(per_sample, device=value.device)).reshape(-1)
        return value.index_select(0, rows)
    if isinstance(value, dict):
        return {key: picked(item, samples, num, dim, flat=flat) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(picked(item, samples, num, dim, flat=flat) for item in value)
    return value


def _counts(value: Tensor, num: int) -> bool:
    """0, 1, 2 …: places in the batch, as a contrastive loss has them for labels. A smaller batch has fewer of them."""
    if value.dim() != 1 or value.shape[0] != num or value.is_floating_point() or value.dtype == torch.bool:
        return False
    return torch.equal(value, torch.arange(num, dtype=value.dtype, device=value.device))
