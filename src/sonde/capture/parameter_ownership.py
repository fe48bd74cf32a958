"""Who holds which parameter: trainable parameters that no optimizer holds, and parameters that an optimizer holds but no model uses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from sonde.capture.zero_grad_tracking import OptimizerGradients, optimizer_parameters
from sonde.events import OwnershipChanged

MAX_UNOWNED = 200  # names in one event
MAX_FOREIGN = 20

NamedParameter = tuple[str, torch.nn.Parameter]


def find_ownership(
    named: Iterable[NamedParameter],
    optimizers: Iterable[tuple[OptimizerGradients, torch.optim.Optimizer]],
    left_behind: list[dict[str, Any]],
    *,
    reads_gradients: bool = True,
) -> tuple[OwnershipChanged, list[NamedParameter]]:
    """The event, and the trainable parameters that no optimizer holds. Without `reads_gradients` every parameter counts as one with a
    gradient: another thread may be writing it."""
    models = {id(p): (name, p) for name, p in named}
    owned: set[int] = set()
    table: list[dict[str, Any]] = []
    for entry, optimizer in optimizers:
        held = optimizer_parameters(optimizer)
        owned.update(id(p) for p in held)
        foreign = [p for p in held if id(p) not in models]
        table.append(
            {
                "optimizer": entry.index,
                "class": type(optimizer).__name__,
                "num_owned": len(held) - len(foreign),
                "num_foreign": len(foreign),
                "num_foreign_with_grad": sum(not reads_gradients or p.grad is not None for p in foreign),
                "foreign": [str(tuple(p.shape)) for p in foreign[:MAX_FOREIGN]],
            }
        )
    unowned = [(name, p) for name, p in models.values() if p.requires_grad and id(p) not in owned]
    names = [name for name, _ in unowned[:MAX_UNOWNED]]
    return OwnershipChanged(num_unowned=len(unowned), unowned=names, optimizers=table, left_behind=left_behind or None), unowned
