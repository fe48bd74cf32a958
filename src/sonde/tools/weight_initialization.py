"""How a weight was initialised, told from its numbers, and whether that fits the activation that follows.

Shapes are told by kurtosis and scales by the standard deviation, each with the error that so many numbers leave. Where several
recipes give the same numbers, all of them are named.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.rules.words import number
from sonde.tools.tensor_statistics import Quick, quick

FEWEST = 64  # elements: below that neither shape nor scale can be told
ERRORS = 4.0  # standard errors: as far as chance may move a deviation
SLACK = 0.01  # of the scale, beyond chance
MOST = 1 << 20  # elements looked at for the shape; more would not change the answer
UNIFORM_BELOW, NORMAL_FROM = 2.2, 2.75  # kurtosis: uniform 1.8, cut off at two deviations 2.37, normal 3
GRAM_ROWS = 256  # of an orthogonal matrix that are compared
ORTHOGONAL = 1e-3  # how far from zero and from each other the products of rows may be, by their length squared
FITS_FROM, FITS_TO = 0.5, 2.0  # growth of the signal in one layer that a few layers bear

GAINS = {
    "ReLU": math.sqrt(2), "ReLU6": math.sqrt(2), "LeakyReLU": math.sqrt(2), "PReLU": math.sqrt(2), "ELU": math.sqrt(2),
    "GELU": math.sqrt(2), "SiLU": math.sqrt(2), "Mish": math.sqrt(2), "Hardswish": math.sqrt(2), "Softplus": 1.0,
    "Tanh": 5 / 3, "Sigmoid": 1.0, "SELU": 1.0, "Softmax": 1.0, "LogSoftmax": 1.0, "Identity": 1.0, "": 1.0,
}  # fmt: skip
"""What keeps the size of the signal: the standard deviation times the root of the fan-in. Smooth relatives of ReLU are treated like it."""

KAIMING_FOR = {name for name, gain in GAINS.items() if gain == math.sqrt(2)}


@dataclass(frozen=True, slots=True)
class Initialisation:
    recipes: tuple[str, ...]  # those that give such numbers, the likeliest first; empty: none that is known, or trained since
    shape: str  # "uniform", "normal", "truncated normal", "orthogonal", "zeros", "constant", "identity" or "could not tell"
    std: float
    fit: str = "could not tell"  # "fits", "small", "large" or "could not tell"
    reason: str = ""

    @property
    def name(self) -> str:
        if self.recipes:
            return " or ".join(self.recipes)
        return self.shape if self.shape == "could not tell" else f"{self.shape} with std {number(self.std)}, which no recipe gives"


_EXACT = ("zeros", "constant", "identity")


@torch.no_grad()
def recognise(weight: Tensor, *, owner: str = "", hidden_size: int = 0) -> Initialisation:
    """`owner` is the class of the module; `hidden_size` belongs to recurrent ones, whose default goes by it."""
    found = quick(weight)
    if found.unsupported or not found.num or not found.is_finite:
        return Initialisation((), "could not tell", found.std, reason=found.unsupported or "it is empty or not finite")
    if found.zeros == found.num:
        return Initialisation(("zeros",), "zeros", 0.0)
    if found.min == found.max and found.num > 1:
        return Initialisation((f"constant {number(found.mean)}",), "constant", 0.0)
    matrix = weight.detach().reshape(weight.shape[0], -1) if weight.ndim >= 2 else None
    if matrix is None or found.num < FEWEST:
        return Initialisation((), "could not tell", found.std, reason=f"{found.num} numbers are too few, or they are no matrix")
    if matrix.shape[0] == matrix.shape[1] and found.zeros == found.num - matrix.shape[0] and bool((matrix.diagonal() == 1).all()):
        return Initialisation(("identity",), "identity", found.std)
    gain = _orthogonal_gain(matrix)
    if gain is not None:
        return Initialisation((f"orthogonal, gain {number(gain)}",), "orthogonal", found.std)
    shape = _shape(weight, found)
    return Initialisation(_recipes(weight, found, shape, owner, hidden_size), shape, found.std)


def _orthogonal_gain(matrix: Tensor) -> float | None:
    """The common length of orthogonal rows (or columns, whichever are fewer); None where they are not orthogonal."""
    if not matrix.is_floating_point() or min(matrix.shape) < 2:
        return None
    rows = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    rows = rows[:: -(-rows.shape[0] // GRAM_ROWS)].to(torch.float64)
    gram = rows @ rows.T
    lengths = gram.diagonal()
    square = float(lengths.mean())
    loose = max(ORTHOGONAL, 8 * torch.finfo(matrix.dtype).eps) * square
    off = float((gram - torch.diag(lengths)).abs().max())
    if square > 0 and off <= loose and float((lengths - square).abs().max()) <= loose:
        return math.sqrt(square)
    return None


def _shape(weight: Tensor, found: Quick) -> str:
    if not weight.is_floating_point():
        return "could not tell"
    flat = weight.detach().reshape(-1)
    flat = flat[:: -(-flat.numel() // MOST)].to(torch.float64)
    deviation = flat - found.mean
    square = float(deviation.square().mean())
    kurtosis = float(deviation.square().square().mean()) / (square * square) if square > 0 else math.nan
    # A uniform sample ends where it is still dense: its largest is root 3 deviations out, never 2.
    if kurtosis < UNIFORM_BELOW and found.max_abs < 2 * found.std:
        return "uniform"
    chance = ERRORS * math.sqrt(24 / flat.numel())  # as far as the kurtosis of a normal sample may be from 3
    if kurtosis < min(NORMAL_FROM, 3 - chance):
        return "truncated normal" if kurtosis > UNIFORM_BELOW else "could not tell"
    return "normal" if kurtosis < 3.25 + chance else "could not tell"


def _recipes(weight: Tensor, found: Quick, shape: str, owner: str, hidden_size: int) -> tuple[str, ...]:
    if shape == "could not tell" or abs(found.mean) > (ERRORS / math.sqrt(found.num) + SLACK) * found.std:
        return ()
    fan_in, fan_out = torch.nn.init._calculate_fan_in_and_fan_out(weight)
    kaiming, xavier = math.sqrt(2 / fan_in), math.sqrt(2 / (fan_in + fan_out))
    default = {"uniform": 1 / math.sqrt(3 * fan_in)}.get(shape, math.nan)
    if hidden_size:
        default = {"uniform": 1 / math.sqrt(3 * hidden_size)}.get(shape, math.nan)
    elif owner in ("Embedding", "EmbeddingBag"):
        default = 1.0 if shape == "normal" else math.nan
    known = [
        ("torch default", default),
        (f"Xavier {shape}", xavier),
        (f"Kaiming {shape}", kaiming),
        (f"Kaiming {shape}, fan-out", math.sqrt(2 / fan_out)),
        (f"LeCun {shape}", 1 / math.sqrt(fan_in)),
        (f"Xavier {shape}, gain 5/3", xavier * 5 / 3),
        (f"{shape} with std 0.02", 0.02),
        (f"{shape} with std 0.01", 0.01),
    ]
    # The relative error of a standard deviation from n numbers: root of (kurtosis - 1) / 4n, with the kurtosis of the shape.
    chance = ERRORS * math.sqrt((0.8 if shape == "uniform" else 2.0) / (4 * found.num)) + SLACK
    matches = [(name, abs(found.std / std - 1)) for name, std in known if std == std and abs(found.std / std - 1) <= chance]
    if shape == "uniform" and any(name == "LeCun uniform" for name, _ in matches) and len(matches) > 1:
        matches = [match for match in matches if match[0] != "LeCun uniform"]  # hardly ever meant
    return tuple(name for name, _ in sorted(matches, key=lambda match: match[1]))


def fitted(init: Initialisation, weight: Tensor, activation: str | None) -> Initialisation:
    """The same with a word on the activation that follows; None: it is not known."""
    if activation is None:
        return _with(init, "could not tell", "which activation follows is not known: give data, or use nn.Sequential")
    if activation == "normalisation":
        return _with(init, "fits", "normalisation follows, which evens out the scale")
    if activation not in GAINS:
        return _with(init, "could not tell", f"no initialisation is known to belong to {activation}")
    if init.shape in _EXACT and init.shape != "identity":
        alike = "all units start alike and stay alike" if init.shape == "constant" else "the layer passes nothing on until it has learnt"
        return _with(init, "small" if init.shape == "zeros" else "could not tell", alike)
    if init.std != init.std or weight.ndim < 2:
        return _with(init, "could not tell", init.reason)
    growth = init.std * math.sqrt(torch.nn.init._calculate_fan_in_and_fan_out(weight)[0]) / GAINS[activation]
    after = f"before {activation}" if activation else "with no activation after it"
    text = f"{after} the signal changes by a factor of {number(growth)} in this layer"
    if growth < FITS_FROM:
        return _with(init, "small", f"{text}: a few layers bear that, many do not; {_better(activation)}")
    if growth > FITS_TO:
        return _with(init, "large", f"{text}; {_better(activation)}")
    return _with(init, "fits", text)


def _better(activation: str) -> str:
    if activation in KAIMING_FOR:
        return "Kaiming keeps it: torch.nn.init.kaiming_normal_(weight, nonlinearity='relu')"
    return "Xavier keeps it: torch.nn.init.xavier_uniform_(weight" + (", gain=5/3)" if activation == "Tanh" else ")")


def _with(init: Initialisation, fit: str, reason: str) -> Initialisation:
    return Initialisation(init.recipes, init.shape, init.std, fit, reason)
