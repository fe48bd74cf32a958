"""The singular values of a weight: how far it stretches, how much of its rank is in use. The cost is bounded however large it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

EXACT_UP_TO = 512  # rows or columns, whichever are fewer; above it a part of that size is looked at
LONGEST = 1 << 12  # of the other dimension
LANCZOS_STEPS = 30  # for the largest singular value of a larger matrix: right to a part in a thousand
COLLAPSED = 0.1  # effective rank over the full rank: random matrices sit at 0.8, trained ones rarely below 0.3
SMALLEST_JUDGED = 8  # rows or columns: a matrix with fewer has no rank to lose
_SEED = 2718  # of a generator of our own: the user's random numbers are not touched


@dataclass(frozen=True, slots=True)
class Spectrum:
    """Of the weight as a matrix of outputs by inputs. NaN is what a part of a large matrix cannot tell."""

    rows: int
    columns: int
    largest: float
    smallest: float
    condition: float  # largest over smallest; Infinity for a singular matrix
    stable_rank: float  # squared Frobenius norm over squared largest singular value
    effective_rank: float  # exp of the entropy of the singular values
    numerical_rank: int  # singular values above rounding
    full_rank: int  # what the two ranks before it can be at most
    sampled: str = ""  # how large the part is that the last three are of; empty where it is the whole

    @property
    def is_collapsed(self) -> bool:
        """Far fewer directions are in use than there are."""
        return self.full_rank >= SMALLEST_JUDGED and 0 < self.effective_rank < COLLAPSED * self.full_rank


@torch.no_grad()
def spectrum(weight: Tensor) -> Spectrum | str:
    """The spectrum, or why there is none."""
    matrix = weight.detach()
    if matrix.ndim < 2 or not matrix.numel():
        return "it is no matrix"
    if not (matrix.is_floating_point() or matrix.is_complex()) or matrix.layout is not torch.strided or matrix.is_meta:
        return f"singular values of {matrix.dtype} in this layout are not computed"
    matrix = matrix.reshape(matrix.shape[0], -1)
    if matrix.dtype not in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        matrix = matrix.float()
    if not bool(torch.isfinite(matrix).all()):
        return "it holds NaN or Inf"
    rows, columns = matrix.shape
    part = matrix[_spread(rows, columns), :][:, _spread(columns, rows)]
    whole = part.numel() == matrix.numel()
    # float64, or the smallest of many singular values would be rounding.
    values = torch.linalg.svdvals(part.to(torch.float64 if not part.is_complex() else torch.complex128)).cpu()
    top = float(values[0])
    largest = top if whole else max(_largest(matrix), top)
    frobenius = float(torch.linalg.vector_norm(matrix, dtype=None if matrix.is_complex() else torch.float64))
    eps = torch.finfo(weight.dtype).eps
    shares = values / values.sum() if top > 0 else values
    entropy = -float(torch.special.xlogy(shares, shares).sum())
    smallest = float(values[-1])
    return Spectrum(
        rows=rows,
        columns=columns,
        largest=largest,
        smallest=smallest if whole else math.nan,
        condition=(top / smallest if smallest > 0 else math.inf) if whole and top > 0 else math.nan,
        stable_rank=(frobenius / largest) ** 2 if largest > 0 else 0.0,
        effective_rank=math.exp(entropy) if top > 0 else 0.0,
        numerical_rank=int((values > top * max(part.shape) * eps).sum()) if top > 0 else 0,
        full_rank=min(part.shape),
        sampled="" if whole else f"{part.shape[0]} x {part.shape[1]} of {rows} x {columns}",
    )


def _spread(size: int, other: int) -> Tensor:
    """Evenly spaced rows or columns; all of them where the cost is bounded by the other dimension."""
    limit = LONGEST if other <= EXACT_UP_TO else EXACT_UP_TO
    if size <= limit:
        return torch.arange(size)
    return torch.linspace(0, size - 1, limit, dtype=torch.float64).round().long()


def _largest(matrix: Tensor) -> float:
    """By Lanczos' method on the product with its transpose, from below."""
    start = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(_SEED), dtype=torch.float32)
    vector = start.to(device=matrix.device, dtype=matrix.dtype)
    vector = vector / torch.linalg.vector_norm(vector)
    basis = vector[None]
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(LANCZOS_STEPS):
        image = matrix.mH @ (matrix @ vector)
        diagonal.append(float(torch.vdot(vector, image).real))
        for _ in range(2):  # twice, or rounding brings earlier directions back
            image = image - basis.mT @ (basis.conj() @ image)
        length = float(torch.linalg.vector_norm(image))
        if length <= 1e-6 * diagonal[0]:
            break
        beside.append(length)
        vector = image / length
        basis = torch.cat([basis, vector[None]])
    sides = torch.tensor(beside[: len(diagonal) - 1], dtype=torch.float64)
    small = torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(sides, 1) + torch.diag(sides, -1)
    return math.sqrt(max(float(torch.linalg.eigvalsh(small)[-1]), 0.0))
