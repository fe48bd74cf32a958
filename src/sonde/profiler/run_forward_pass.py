"""One forward pass on the inputs of the user: the arguments for `forward`, an error that explains wrong inputs, and eval mode restored."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sonde.errors import SondeError


def forward_arguments(data: Any) -> Iterator[tuple[Sequence[Any], Mapping[str, Any]]]:
    """Yields `(args, kwargs)` for `forward`, per batch. A batch is a tensor, a tuple of arguments or a dict of keyword arguments; a list
    is several batches."""
    for batch in data if isinstance(data, list) else [data]:
        if isinstance(batch, Mapping):
            yield (), batch
        else:
            yield (tuple(batch), {}) if isinstance(batch, tuple) else ((batch,), {})


@contextmanager
def input_errors_explained() -> Iterator[None]:
    """An exception in a call of the model becomes a `SondeError` that says what the inputs must be."""
    try:
        yield
    except Exception as error:
        raise SondeError(
            f"The model could not be run with these inputs: {type(error).__name__}: {error}.\n"
            "Pass what its forward takes: a tensor, a tuple of arguments, a dict of keyword arguments, or a list of these."
        ) from error


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
