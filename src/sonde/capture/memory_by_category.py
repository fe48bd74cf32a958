"""How many bytes parameters, gradients and optimizer state take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from sonde.statistics.find_tensors import find_tensors, storage_bytes


def memory_by_category(models: Mapping[str, nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, int]:
    """Bytes of `parameters` (with buffers), `gradients` and `optimizer_state`."""
    parameters = materialized_tensors(models)
    gradients = [tensor.grad for tensor in parameters if tensor.is_leaf and tensor.grad is not None]
    states = [value for optimizer in optimizers for state in optimizer.state.values() for _, value in find_tensors(state)]
    return {"parameters": storage_bytes(parameters), "gradients": storage_bytes(gradients), "optimizer_state": storage_bytes(states)}


def materialized_tensors(models: Mapping[str, nn.Module]) -> list[Tensor]:
    """Parameters and buffers, without those of lazy modules that have not run."""
    held = [tensor for model in models.values() for tensor in (*model.parameters(), *model.buffers())]
    return [tensor for tensor in held if not nn.parameter.is_lazy(tensor)]
