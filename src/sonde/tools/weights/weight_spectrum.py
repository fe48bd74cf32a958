"""Singular values and ranks of a weight matrix, at a bounded cost for large matrices."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

EXACT_UP_TO = 512  # rows or columns, whichever are fewer; of larger matrices a part of that size is decomposed
LONGEST = 1 << 12  # of the other dimension
LANCZOS_STEPS = 30  # for the largest singular value of a larger matrix: correct to one part in a thousand
COLLAPSED = 0.1  # effective rank over full rank: about 0.8 for random matrices, rarely below 0.3 for trained ones
SMALLEST_JUDGED = 8  # rows or columns: the rank of a smaller matrix means little
_SEED = 2718  # of a separate generator: the user's random state does not change


@dataclass(frozen=True, slots=True)
class WeightSpectrum:
    """Singular values of a weight as a matrix of outputs by inputs. NaN is a value that needs the whole of a large matrix."""

    rows: int
    columns: int
    largest: float
    smallest: float
    condition: float  # largest over smallest; Infinity for a singular matrix
    stable_rank: float  # squared Frobenius norm over squared largest singular value
    effective_rank: float  # exp of the entropy of the singular values
    numerical_rank: int  # singular values above rounding
    full_rank: int  # upper bound of the two ranks above
    sampled: str = ""  # size of the part that the last three were computed from; empty if it was the whole matrix

    @property
    def is_collapsed(self) -> bool:
        """The effective rank is far below the full rank."""
        return self.full_rank >= SMALLEST_JUDGED and 0 < self.effective_rank < COLLAPSED * self.full_rank


@torch.no_grad()
def compute_spectrum(weight: Tensor) -> WeightSpectrum | str:
    """Returns the spectrum, or the reason why there is none."""
    matrix = weight.detach()
    if matrix.ndim < 2 or not matrix.numel():
        return "it is not a matrix"
    if not (matrix.is_floating_point() or matrix.is_complex()) or matrix.layout is not torch.strided or matrix.is_meta:
        return f"singular values of {matrix.dtype} in this layout are not computed"
    matrix = matrix.reshape(matrix.shape[0], -1)
    if matrix.dtype not in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        matrix = matrix.float()
    if not bool(torch.isfinite(matrix).all()):
        return "it holds NaN or Inf"
    rows, columns = matrix.shape
    part = matrix[_sampled_indices(rows, columns), :][:, _sampled_indices(columns, rows)]
    whole = part.numel() == matrix.numel()
    # In float32 the smallest of many singular values would be rounding errors.
    values = torch.linalg.svdvals(part.to(torch.float64 if not part.is_complex() else torch.complex128)).cpu()
    top = float(values[0])
    largest = top if whole else max(_largest_singular_value(matrix), top)
    frobenius = float(torch.linalg.vector_norm(matrix, dtype=None if matrix.is_complex() else torch.float64))
    eps = torch.finfo(weight.dtype).eps
    shares = values / values.sum() if top > 0 else values
    entropy = -float(torch.special.xlogy(shares, shares).sum())
    smallest = float(values[-1])
    return WeightSpectrum(
        rows=rows, columns=columns, largest=largest, smallest=smallest if whole else math.nan,
        condition=(top / smallest if smallest > 0 else math.inf) if whole and top > 0 else math.nan,
        stable_rank=(frobenius / largest) ** 2 if largest > 0 else 0.0, effective_rank=math.exp(entropy) if top > 0 else 0.0,
        numerical_rank=int((values > top * max(part.shape) * eps).sum()) if top > 0 else 0, full_rank=min(part.shape),
        sampled="" if whole else f"{part.shape[0]} x {part.shape[1]} of {rows} x {columns}",
    )  # fmt: skip


def _sampled_indices(size: int, other: int) -> Tensor:
    """Evenly spaced indices of rows or columns; all of them if the other dimension bounds the cost."""
    limit = LONGEST if other <= EXACT_UP_TO else EXACT_UP_TO
    return torch.arange(size) if size <= limit else torch.linspace(0, size - 1, limit, dtype=torch.float64).round().long()


def _largest_singular_value(matrix: Tensor) -> float:
    """By the Lanczos method on the product of the matrix with its transpose; the estimate approaches the value from below."""
    start = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(_SEED), dtype=torch.float32)
    vector = start.to(device=matrix.device, dtype=matrix.dtype)
    vector = vector / torch.linalg.vector_norm(vector)
    basis = vector[None]
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    for _ in range(LANCZOS_STEPS):
        image = matrix.mH @ (matrix @ vector)
        diagonal.append(float(torch.vdot(vector, image).real))
        for _ in range(2):  # twice: after one pass rounding brings earlier directions back
            image = image - basis.mT @ (basis.conj() @ image)
        length = float(torch.linalg.vector_norm(image))
        if length <= 1e-6 * diagonal[0]:
            break
        off_diagonal.append(length)
        vector = image / length
        basis = torch.cat([basis, vector[None]])
    sides = torch.tensor(off_diagonal[: len(diagonal) - 1], dtype=torch.float64)
    small = torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(sides, 1) + torch.diag(sides, -1)
    return math.sqrt(max(float(torch.linalg.eigvalsh(small)[-1]), 0.0))
