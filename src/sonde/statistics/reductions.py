"""Numbers of whole lists of tensors: is everything finite, the sum of squares, norms, is anything not zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from sonde.events import STATISTICS
from sonde.statistics import deferred_reads, native, torch_ops
from sonde.statistics.torch_ops import readable


def check_finite(tensors: Sequence[Tensor | None]) -> tuple[float, int]:
    """The sum of squares of all elements, and the index of the first tensor with a non-finite value (-1: none).

    Runs over every gradient at every step. Where a value is not finite, the sum is not either. All tensors of a device cost one transfer;
    where nobody may wait for that, there is `norms`.
    """
    if native.ENABLED:
        total, first_bad, rest = native.extension.guard(tensors)
        if rest is None:
            return total, first_bad
    else:
        total, first_bad, rest = 0.0, -1, [i for i, tensor in enumerate(tensors) if tensor is not None]
    plain: dict[int, Tensor] = {}
    for i in rest:
        try:
            tensor = tensors[i]
            if tensor is not None and tensor.numel():
                plain[i] = readable(tensor)
        except Exception:  # no numbers, nothing to guard
            continue
    for i, norm in zip(plain, _norms(list(plain.values()))):
        square = norm * norm
        if not math.isfinite(square):  # a bad value, or too large for this way of counting
            square, is_bad = _exact_square(plain[i])
            if is_bad:
                first_bad = i if first_bad < 0 else min(i, first_bad)
        total += square
    return total, first_bad


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """The L2 norm of each tensor of one device, still there; not finite where an element is not."""
    with torch.no_grad():
        return torch.stack(torch_ops.norms([readable(tensor) for tensor in tensors]))


def read_element(tensor: Tensor) -> float | None:
    """A one-element tensor as a float, without a torch operation; None where only torch can read it."""
    return native.extension.number(tensor) if native.ENABLED else None


def any_nonzero(tensors: Sequence[Tensor | None], limit_elements: int = 4096) -> bool:
    """Is any element not zero? Looks at the first `limit_elements` of each tensor and stops at the first that it finds."""
    if native.ENABLED:
        found, rest = native.extension.any_nonzero(tensors, limit_elements)
        if found or rest is None:
            return found
    else:
        rest = list(range(len(tensors)))
    flags = []
    for i in rest:
        tensor = tensors[i]
        try:
            if tensor is not None and tensor.numel():
                flags.append(torch_ops.nonzero(readable(tensor), limit_elements))
        except Exception:  # no numbers: nothing that could be left over
            continue
    return any(value > 0 for value in _brought_over(flags))


def _brought_over(numbers: Sequence[Tensor]) -> list[float]:
    """Numbers from wherever they are, by one transfer per device."""
    values = [math.nan] * len(numbers)

    def use(i: int, found: Sequence[float] | Exception) -> None:
        values[i] = math.nan if isinstance(found, Exception) else float(found[0])

    deferred_reads.fetch_all([(number, partial(use, i)) for i, number in enumerate(numbers)])
    return values


def _norms(tensors: Sequence[Tensor]) -> list[float]:
    try:
        return _brought_over(torch_ops.norms(tensors))
    except Exception:
        return [math.nan] * len(tensors)  # then each is looked at alone


def _exact_square(plain: Tensor) -> tuple[float, bool]:
    try:
        result = torch_ops.statistics(plain)
        numbers = dict(zip(STATISTICS, [] if result is None else result.tolist()))
    except Exception:
        return 0.0, False
    is_bad = bool(numbers.get("nan") or numbers.get("inf"))
    l2 = math.nan if is_bad else numbers.get("l2", 0.0)
    return l2 * l2, is_bad
