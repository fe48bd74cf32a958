"""Reductions of lists of tensors to a few numbers: finite check, sum of squares, norms, any non-zero element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from sonde.events import STATISTICS
from sonde.statistics import batched_device_reads, native_extension, statistics_without_extension
from sonde.statistics.statistics_without_extension import has_own_dispatch, measurable


def check_finite(tensors: Sequence[Tensor | None], *, runs_users_dispatch: bool = True) -> tuple[float, int]:
    """Check every element of every tensor; runs over all gradients at every step. Returns the sum of squares of all elements, and the index
    of the first tensor with a non-finite value (-1: none). If a value is not finite, neither is the sum; it is NaN also where no tensor
    could be read. Tensors on a device cost one transfer per device; use `norms` where the caller must not wait. Without
    `runs_users_dispatch`, tensors of classes with `__torch_dispatch__` are not read: each operation on them runs Python code."""
    if native_extension.ENABLED:
        total, first_bad, unhandled = native_extension.extension.check_finite(tensors)
        if unhandled is None:
            return total, first_bad
    else:
        total, first_bad, unhandled = 0.0, -1, [i for i, tensor in enumerate(tensors) if tensor is not None]
    plain: dict[int, Tensor] = {}
    num_unread = 0
    for i in unhandled:
        try:
            tensor = tensors[i]
            if tensor is not None and not runs_users_dispatch and has_own_dispatch(tensor):
                num_unread += 1
            elif tensor is not None and tensor.numel():
                plain[i] = measurable(tensor)
        except Exception:  # a tensor without readable values cannot be checked
            num_unread += 1
    for i, norm in zip(plain, _read_norms(list(plain.values()))):
        square: float | None = norm * norm
        if not math.isfinite(norm * norm):  # a non-finite value, or a square that overflows
            square, is_bad = _exact_square(plain[i])
            if is_bad:
                first_bad = i if first_bad < 0 else min(i, first_bad)
        if square is None:
            num_unread += 1
        else:
            total += square
    is_nothing_read = num_unread > 0 and num_unread == sum(tensor is not None for tensor in tensors)
    return math.nan if is_nothing_read else total, first_bad


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """The L2 norm of each tensor of one device, as one tensor on that device; a norm is not finite if an element is not."""
    with torch.no_grad():
        return torch.stack(statistics_without_extension.norms([measurable(tensor) for tensor in tensors]))


def read_element(tensor: Tensor) -> float | None:
    """A one-element tensor as a float, without a torch operation; None where only torch can read it."""
    return native_extension.extension.read_element(tensor) if native_extension.ENABLED else None


def any_nonzero(tensors: Sequence[Tensor | None], limit_elements: int = 4096) -> bool:
    """Whether any of the first `limit_elements` of any tensor is not zero. Stops at the first that it finds."""
    if native_extension.ENABLED:
        is_found, unhandled = native_extension.extension.any_nonzero(tensors, limit_elements)
        if is_found or unhandled is None:
            return is_found
    else:
        unhandled = list(range(len(tensors)))
    flags = []
    for i in unhandled:
        tensor = tensors[i]
        try:
            if tensor is not None and tensor.numel():
                flags.append(statistics_without_extension.nonzero(measurable(tensor), limit_elements))
        except Exception:  # a tensor without readable values counts as zero
            continue
    return any(value > 0 for value in _read_all(flags))


def _read_all(numbers: Sequence[Tensor]) -> list[float]:
    """One-element tensors as floats, in one transfer per device; NaN for those that cannot be read."""
    values = [math.nan] * len(numbers)

    def use(i: int, result: Sequence[float] | Exception) -> None:
        values[i] = math.nan if isinstance(result, Exception) else float(result[0])

    batched_device_reads.fetch_all([(number, partial(use, i)) for i, number in enumerate(numbers)])
    return values


def _read_norms(tensors: Sequence[Tensor]) -> list[float]:
    try:
        return _read_all(statistics_without_extension.norms(tensors))
    except Exception:
        return [math.nan] * len(tensors)  # the caller then computes each of them exactly


def _exact_square(plain: Tensor) -> tuple[float | None, bool]:
    """The sum of squares and whether a value is not finite; None where the tensor cannot be read."""
    numbers: dict[str, float] = {}

    def use(values: Sequence[float] | Exception) -> None:
        if not isinstance(values, Exception):
            numbers.update(zip(STATISTICS, values))

    try:
        result = statistics_without_extension.statistics(plain)
    except Exception:
        return None, False
    if result is not None:
        batched_device_reads.fetch_all([(result, use)])
    if not numbers:
        return None, False
    is_bad = bool(numbers["nan"] or numbers["inf"])
    l2 = math.nan if is_bad else numbers["l2"]
    return l2 * l2, is_bad
