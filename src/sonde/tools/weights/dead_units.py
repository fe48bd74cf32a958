"""Dead units: output features or channels that never respond to the input, found by their weights or by their activations."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.formatting import number, printable
from sonde.tools.weights.following_activation import ZEROING

TINY = 1e-6  # of the median norm of the layer's units: practically zero in float32
FAR_BELOW = 8.0  # bias below zero, in norms of the unit's weights: inputs of unit scale exceed it once in 1e15
MIN_VALUES = 64  # values per unit: with fewer, a unit that is rarely active would count as dead


@dataclass(frozen=True, slots=True)
class DeadNeuron:
    """One dead unit with the evidence."""

    layer: str
    unit: int  # row of the weight: an output feature or channel
    evidence: str  # "weights" or "activations"
    reason: str

    def __str__(self) -> str:
        return printable(f"unit {self.unit} of {self.layer}: {self.reason}")


@torch.no_grad()
def dead_by_weights(layer: str, weight: Tensor, bias: Tensor | None, activation: str | None) -> Iterator[DeadNeuron]:
    """Units with zero, tiny, constant or non-finite weights, or a bias far below zero before a ReLU. A layer that is zero as a whole was
    initialized so, and its units are not listed."""
    if weight.ndim < 2 or not weight.numel() or not weight.is_floating_point() or weight.layout is not torch.strided or weight.is_meta:
        return
    rows = weight.detach().reshape(weight.shape[0], -1).to(torch.float64)
    norms = torch.linalg.vector_norm(rows, dim=1)
    usual = float(norms.nanmedian())
    if not float(norms.nan_to_num(0.0).max()) > 0:
        return
    constant = (rows == rows[:, :1]).all(1) & (norms > 0) if rows.shape[1] > 2 else torch.zeros_like(norms, dtype=torch.bool)
    shift = None if bias is None or bias.numel() != len(norms) else bias.detach().to(torch.float64)
    cut = shift < -FAR_BELOW * norms if shift is not None and activation in ZEROING else torch.zeros_like(constant)
    for unit in torch.nonzero(~(norms > TINY * usual) | constant | cut).flatten().tolist():
        norm = float(norms[unit])
        if norm != norm:
            reason = "its weights are not finite"
        elif norm == 0:
            reason = "all of its weights are zero, so its output does not depend on the input"
        elif norm <= TINY * usual:
            reason = f"the norm of its weights, {number(norm)}, is {number(norm / usual)} times that of the layer's median unit"
        elif bool(constant[unit]):
            reason = f"all of its weights are {number(float(rows[unit, 0]))}: its output depends only on the sum of its inputs"
        else:
            below = float(shift[unit]) if shift is not None else 0.0
            distance = f"{number(-below / norm)} times the norm of its weights below zero"
            reason = f"its bias of {number(below)} is {distance}, and {activation} follows"
        yield DeadNeuron(layer, unit, "weights", reason)


def dead_by_activations(layer: str, num_positive: Tensor, num_values: int) -> Iterator[DeadNeuron]:
    """Units without a value above zero among `num_values` values per unit; none if there are fewer than MIN_VALUES."""
    if num_values >= MIN_VALUES:
        for unit in torch.nonzero(num_positive == 0).flatten().tolist():
            yield DeadNeuron(layer, unit, "activations", f"it was never above zero in {num_values:,} values")
