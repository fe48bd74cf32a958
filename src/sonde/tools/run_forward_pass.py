"""One forward pass for analysis: the arguments for `forward`, and a context that restores modes and random state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def forward_arguments(data: Any) -> Iterator[tuple[Sequence[Any], Mapping[str, Any]]]:
    """Yields `(args, kwargs)` for `forward`, per batch. A batch is a tensor, a tuple of arguments or a dict of keyword arguments; a list
    is several batches."""
    for batch in data if isinstance(data, list) else [data]:
        if isinstance(batch, Mapping):
            yield (), batch
        else:
            yield (tuple(batch), {}) if isinstance(batch, tuple) else ((batch,), {})


@contextmanager
def eval_mode_restored(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients. On exit every module has its earlier mode and the random generators their earlier state."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=[index for index in devices if index is not None]), torch.no_grad():
        try:
            model.eval()
            yield
        finally:
            for module, mode in modes:
                module.training = mode
