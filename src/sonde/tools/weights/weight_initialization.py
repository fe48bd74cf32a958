"""Recognizes how a weight was initialized (the kurtosis identifies the shape of the distribution, the standard deviation its scale, both
within the sampling error), and whether the scale fits the activation that follows."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sonde.formatting import number
from sonde.statistics.private_torch_api import fan_in_and_fan_out
from sonde.tools.tensors.describe_tensor import FastStatistics, fast_statistics

MIN_ELEMENTS = 64  # with fewer, neither shape nor scale can be identified
ERRORS = 4.0  # standard errors that a sample may deviate by chance
TOLERANCE = 0.01  # of the scale, in addition to chance
MAX_SAMPLED = 1 << 20  # elements read for the shape; more would not change the result
UNIFORM_BELOW, NORMAL_FROM = 2.2, 2.75  # kurtosis: uniform 1.8, truncated at two deviations 2.37, normal 3
GRAM_ROWS = 256  # rows whose products are compared
ORTHOGONAL = 1e-3  # tolerance for the products of rows, relative to their squared length
FITS_FROM, FITS_TO = 0.5, 2.0  # factor of the signal per layer that several layers in a row can take

KAIMING_FOR = ("ReLU", "ReLU6", "LeakyReLU", "PReLU", "ELU", "GELU", "SiLU", "Mish", "Hardswish")  # smooth variants count as ReLU
# Standard deviation times the root of the fan-in that preserves the scale of the signal.
GAINS = {**dict.fromkeys(KAIMING_FOR, math.sqrt(2)), "Tanh": 5 / 3}
GAINS |= dict.fromkeys(("Softplus", "Sigmoid", "SELU", "Softmax", "LogSoftmax", "Identity", ""), 1.0)


@dataclass(frozen=True, slots=True)
class WeightInitialization:
    """The recipes that explain the values of a weight, and the fit to the activation that follows."""

    recipes: tuple[str, ...]  # recipes that give such values, the likeliest first; empty: no known recipe, or already trained
    shape: str  # "uniform", "normal", "truncated normal", "orthogonal", "zeros", "constant", "identity" or "could not tell"
    std: float
    fit: str = "could not tell"  # "fits", "small", "large" or "could not tell"
    reason: str = ""

    @property
    def name(self) -> str:
        """The recipes as text, or shape and standard deviation if no recipe matches."""
        if self.recipes:
            return " or ".join(self.recipes)
        return self.shape if self.shape == "could not tell" else f"{self.shape} with std {number(self.std)}, which no known recipe gives"


@torch.no_grad()
def recognize_initialization(weight: Tensor, *, owner: str = "", hidden_size: int = 0) -> WeightInitialization:
    """Finds the recipes that give the values of `weight`. `owner` is the class name of the module. `hidden_size` is that of recurrent
    modules: torch scales their default by it."""
    found = fast_statistics(weight)
    if found.unsupported or not found.num or not found.is_finite:
        return WeightInitialization((), "could not tell", found.std, reason=found.unsupported or "it is empty or not finite")
    if found.zeros == found.num:
        return WeightInitialization(("zeros",), "zeros", 0.0)
    if found.min == found.max and found.num > 1:
        return WeightInitialization((f"constant {number(found.mean)}",), "constant", 0.0)
    matrix = weight.detach().reshape(weight.shape[0], -1) if weight.ndim >= 2 else None
    if matrix is None or found.num < MIN_ELEMENTS:
        return WeightInitialization((), "could not tell", found.std, reason=f"{found.num} elements are too few, or they are not a matrix")
    if matrix.shape[0] == matrix.shape[1] and found.zeros == found.num - matrix.shape[0] and bool((matrix.diagonal() == 1).all()):
        return WeightInitialization(("identity",), "identity", found.std)
    gain = _orthogonal_gain(matrix)
    if gain is not None:
        return WeightInitialization((f"orthogonal, gain {number(gain)}",), "orthogonal", found.std)
    shape = _shape(weight, found)
    return WeightInitialization(_recipes(weight, found, shape, owner, hidden_size), shape, found.std)


def _orthogonal_gain(matrix: Tensor) -> float | None:
    """The common length of orthogonal rows (or columns, whichever are fewer); None if they are not orthogonal."""
    if not matrix.is_floating_point() or min(matrix.shape) < 2:
        return None
    rows = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    rows = rows[:: -(-rows.shape[0] // GRAM_ROWS)].to(torch.float64)
    gram = rows @ rows.T
    lengths = gram.diagonal()
    square = float(lengths.mean())
    tolerance = max(ORTHOGONAL, 8 * torch.finfo(matrix.dtype).eps) * square
    off = float((gram - torch.diag(lengths)).abs().max())
    is_orthogonal = square > 0 and off <= tolerance and float((lengths - square).abs().max()) <= tolerance
    return math.sqrt(square) if is_orthogonal else None


def _shape(weight: Tensor, found: FastStatistics) -> str:
    if not weight.is_floating_point():
        return "could not tell"
    flat = weight.detach().reshape(-1)
    flat = flat[:: -(-flat.numel() // MAX_SAMPLED)].to(torch.float64)
    deviation = flat - found.mean
    square = float(deviation.square().mean())
    kurtosis = float(deviation.square().square().mean()) / (square * square) if square > 0 else math.nan
    # The largest value of a uniform sample is sqrt(3) deviations from the mean, never 2.
    if kurtosis < UNIFORM_BELOW and found.max_abs < 2 * found.std:
        return "uniform"
    chance = ERRORS * math.sqrt(24 / flat.numel())  # deviation from 3 that a normal sample may have
    if kurtosis < min(NORMAL_FROM, 3 - chance):
        return "truncated normal" if kurtosis > UNIFORM_BELOW else "could not tell"
    return "normal" if kurtosis < 3.25 + chance else "could not tell"


def _recipes(weight: Tensor, found: FastStatistics, shape: str, owner: str, hidden_size: int) -> tuple[str, ...]:
    if shape == "could not tell" or abs(found.mean) > (ERRORS / math.sqrt(found.num) + TOLERANCE) * found.std:
        return ()
    fan_in, fan_out = fan_in_and_fan_out(weight)
    kaiming, xavier = math.sqrt(2 / fan_in), math.sqrt(2 / (fan_in + fan_out))
    default_shape, default = "uniform", 1 / math.sqrt(3 * (hidden_size or fan_in))
    if not hidden_size and owner in ("Embedding", "EmbeddingBag"):
        default_shape, default = "normal", 1.0
    known = [
        ("torch default", default if shape == default_shape else math.nan), (f"Xavier {shape}", xavier), (f"Kaiming {shape}", kaiming),
        (f"Kaiming {shape}, fan-out", math.sqrt(2 / fan_out)), (f"LeCun {shape}", 1 / math.sqrt(fan_in)),
        (f"Xavier {shape}, gain 5/3", xavier * 5 / 3), (f"{shape} with std 0.02", 0.02), (f"{shape} with std 0.01", 0.01),
    ]  # fmt: skip
    # Relative standard error of a standard deviation from n values: sqrt((kurtosis - 1) / 4n), with the kurtosis of the shape.
    chance = ERRORS * math.sqrt((0.8 if shape == "uniform" else 2.0) / (4 * found.num)) + TOLERANCE
    matches = [(name, abs(found.std / std - 1)) for name, std in known if std == std and abs(found.std / std - 1) <= chance]
    if shape == "uniform" and any(name == "LeCun uniform" for name, _ in matches) and len(matches) > 1:
        matches = [match for match in matches if match[0] != "LeCun uniform"]  # rarely used in practice
    return tuple(name for name, _ in sorted(matches, key=lambda match: match[1]))


def with_fit(init: WeightInitialization, weight: Tensor, activation: str | None) -> WeightInitialization:
    """Returns `init` with `fit` and `reason` for the activation that follows the layer (None: unknown)."""
    if activation is None:
        return replace(init, fit="could not tell", reason="the activation that follows is not known: pass data, or use nn.Sequential")
    if activation == "normalization":
        return replace(init, fit="fits", reason="normalization follows and rescales the output")
    if activation not in GAINS:
        return replace(init, fit="could not tell", reason=f"no initialization is known for {activation}")
    if init.shape == "zeros":
        return replace(init, fit="small", reason="the layer outputs zeros until it is trained")
    if init.shape == "constant":
        return replace(init, fit="could not tell", reason="all units start with equal weights and stay equal")
    if init.std != init.std or weight.ndim < 2:
        return replace(init, fit="could not tell", reason=init.reason)
    growth = init.std * math.sqrt(fan_in_and_fan_out(weight)[0]) / GAINS[activation]
    after = f"before {activation}" if activation else "with no activation after it"
    text = f"{after} the signal changes by a factor of {number(growth)} in this layer"
    if growth < FITS_FROM:
        return replace(init, fit="small", reason=f"{text}: few layers in a row can take that, many cannot; {_advice(activation)}")
    if growth > FITS_TO:
        return replace(init, fit="large", reason=f"{text}; {_advice(activation)}")
    return replace(init, fit="fits", reason=text)


def _advice(activation: str) -> str:
    if activation in KAIMING_FOR:
        return "Kaiming keeps the scale: torch.nn.init.kaiming_normal_(weight, nonlinearity='relu')"
    return "Xavier keeps the scale: torch.nn.init.xavier_uniform_(weight" + (", gain=5/3)" if activation == "Tanh" else ")")
