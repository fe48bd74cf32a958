"""The numbers of tensors: the one place where Sonde measures them.

Each tensor goes to the native kernel where that takes it (CPU, the four common floating types, any strides), and otherwise to torch
operations, with the same answers. What torch computes stays on its device until `Rows.settle`, which brings everything over at once.
Nothing here raises because of a tensor, changes one, or keeps one alive.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Parameter

from sonde.events import STATISTICS
from sonde.runlog.format import FramePlan
from sonde.statistics import deferred_reads, torch_ops
from sonde.statistics.torch_ops import Unsupported, readable, reason

try:
    from sonde.capture import _kernel as _native
except ImportError:  # built without a compiler
    _native = None  # type: ignore[assignment]

NATIVE = False
"""Whether the native kernel is in use."""

WHOLE_BYTES = 1 << 20  # up to here a fingerprint is of the whole content
NUM_SAMPLES = 16384  # above it, of so many elements

_IN_NUMPY = {torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8}
_BEST = 2  # instruction set: as far as the processor goes


def use_native(on: bool, *, by_table: bool = True, level: int = _BEST) -> bool:
    """Switch the native kernel on or off; returns whether it is in use now. `by_table` and `level` let tests reach every way through it."""
    global NATIVE, frame_record
    NATIVE, frame_record = False, _by_numpy
    if on and _native is not None:
        table = getattr(Tensor, "__dlpack_c_exchange_api__", None) if by_table else None
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        _native.setup(Tensor, Parameter, dtypes, torch.strided, table, level)
        NATIVE = True
        if sys.byteorder == "little":  # as the run on disk
            frame_record = _native.frame_record
    return NATIVE


def _by_numpy(plan: FramePlan, step: int, time_ns: int, rows: npt.NDArray[np.float64]) -> bytes | None:
    return None


frame_record: Callable[[FramePlan, int, int, npt.NDArray[np.float64]], bytes | None] = _by_numpy
"""What `FramePlan.encode` would say; None where only that can tell. Once in a step, numpy's code has gone cold, and waking it takes longer
than the work."""


use_native(os.environ.get("SONDE_NATIVE", "1") != "0")


class Rows:
    """Rows of `STATISTICS`, planned once and written again at every observed step. The array is `values`.

    A tensor that cannot be measured leaves a row of zeros, as a missing one does, and its reason in `unsupported`.
    """

    __slots__ = ("late", "unsupported", "values")

    def __init__(self, num_rows: int) -> None:
        self.values: npt.NDArray[np.float64] = np.zeros((num_rows, len(STATISTICS)), dtype=np.float64)
        self.unsupported: dict[int, str] = {}
        self.late: dict[int, Tensor] = {}  # what torch has computed for a row, until it is settled

    def measure(self, first_row: int, tensors: Sequence[Tensor | None]) -> None:
        """One row per tensor, from `first_row` on. Rows that torch computes are written by `settle`."""
        if self.late:
            self._forget(range(first_row, first_row + len(tensors)))
        for i in _rest(_native.measure(self.values, first_row, tensors)) if NATIVE else range(len(tensors)):
            self._measure_by_torch(first_row + i, tensors[i])

    def measure_one(self, row: int, tensor: Tensor) -> None:
        if self.late:
            self.late.pop(row, None)
        if not (NATIVE and _native.measure_one(self.values, row, tensor)):
            self._measure_by_torch(row, tensor)

    def guard(self) -> tuple[float, int] | None:
        """What `guard` would say of the tensors behind these rows, without reading them again; None where that is not known yet."""
        return None if self.late or self.unsupported or not NATIVE else _native.guard_rows(self.values)

    def settle(self) -> None:
        """Write what torch computed since the last call: one transfer per device, none where all was native."""
        if self.late:
            deferred_reads.fetch_all(self.pending())

    def pending(self) -> list[tuple[Tensor, deferred_reads.Use]]:
        """The same for several tables in one transfer: what torch computed since the last call, and how it is written."""
        pending, self.late = self.late, {}
        return [(result, partial(self._write, row)) for row, result in pending.items()]

    def _write(self, row: int, numbers: Sequence[float] | Exception) -> None:
        if isinstance(numbers, Exception):
            self._give_up([row], numbers)
        else:
            self.values[row] = numbers

    def _measure_by_torch(self, row: int, tensor: Tensor | None, minus: Tensor | None = None) -> None:
        self.values[row] = 0.0
        if tensor is None:
            return
        try:
            plain = readable(tensor)
            if NATIVE and minus is None and plain is not tensor and _native.measure_one(self.values, row, plain):
                return  # a subclass with ordinary memory below it
            result = torch_ops.statistics(plain, minus)
        except Exception as error:  # whatever a stranger's tensor does, the training goes on
            self._give_up([row], error)
            return
        if result is not None:
            self.late[row] = result

    def _give_up(self, rows: Iterable[int], error: Exception) -> None:
        for row in rows:
            self.values[row] = 0.0
            self.unsupported[row] = reason(error)

    def _forget(self, rows: Iterable[int]) -> None:
        for row in rows:
            self.late.pop(row, None)


class Kept:
    """Copies of parameters, to measure what an update changed. Allocated at the first `keep`, then written over and over.

    Where the copies would take more than `limit_bytes`, `available` turns False for good, `why_not` says why, and `keep` only measures.
    """

    __slots__ = ("_copies", "available", "limit_bytes", "num_bytes", "why_not")

    def __init__(self, limit_bytes: float) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.available = True
        self.why_not = ""
        self._copies: list[Tensor | None] = []

    def keep(self, tensors: Sequence[Tensor | None], rows: Rows, first_row: int) -> None:
        """Measure the tensors as they are now, and remember them."""
        if not self.available:
            rows.measure(first_row, tensors)
            return
        if len(self._copies) != len(tensors):
            self.release()
            self._copies = [None] * len(tensors)
        if rows.late:
            rows._forget(range(first_row, first_row + len(tensors)))
        rest = _rest(_native.keep(rows.values, first_row, tensors, self._copies)) if NATIVE else range(len(tensors))
        for i in rest:
            tensor = tensors[i]
            self._remember(i, tensor)
            if tensor is None:
                rows.values[first_row + i] = 0.0
            else:
                rows.measure_one(first_row + i, tensor)

    def change(self, tensors: Sequence[Tensor | None], rows: Rows, first_row: int) -> None:
        """Measure the tensors minus what they were at the last `keep`. What was not kept gives zeros."""
        copies = self._copies
        if rows.late:
            rows._forget(range(first_row, first_row + len(tensors)))
        if len(copies) != len(tensors):
            rows.values[first_row : first_row + len(tensors)] = 0.0
            return
        for i in _rest(_native.change(rows.values, first_row, tensors, copies)) if NATIVE else range(len(tensors)):
            copy = copies[i]
            rows._measure_by_torch(first_row + i, tensors[i] if copy is not None else None, copy)

    def release(self) -> None:
        """Free the copies."""
        self._copies = []
        self.num_bytes = 0

    def _remember(self, i: int, tensor: Tensor | None) -> None:
        if not self.available:
            return
        copy = self._copies[i]
        try:
            plain = None if tensor is None else readable(tensor)
            if plain is not None and plain.layout is not torch.strided:
                plain = None  # sparse parameters: only their own statistics
            if copy is not None and (plain is None or not _alike(plain, copy)):
                self.num_bytes -= copy.nbytes
                copy = self._copies[i] = None
            if plain is None:
                return
            # Outside of inference mode, or the copy could not be written again once that has ended.
            with torch.inference_mode(False), torch.no_grad():
                if copy is None:
                    if self.num_bytes + plain.nbytes > self.limit_bytes:
                        self._refuse(f"copies of the parameters would take more than {self.limit_bytes / 2**20:g} MiB")
                        return
                    copy = torch.empty_like(plain, requires_grad=False)
                    self.num_bytes += copy.nbytes
                copy.copy_(plain)
            self._copies[i] = copy
        except Unsupported:
            self._copies[i] = None
        except Exception as error:  # no memory, most likely
            self._refuse(reason(error))

    def _refuse(self, why: str) -> None:
        self.available = False
        self.why_not = why
        self.release()


def guard(tensors: Sequence[Tensor | None]) -> tuple[float, int]:
    """The sum of squares of all elements, and the index of the first tensor with a non-finite value (-1: none).

    Runs over every gradient at every step. Where a value is not finite, the sum is not either. All tensors of a device cost one transfer;
    where nobody may wait for that, there is `norms_of`.
    """
    if NATIVE:
        total, first_bad, rest = _native.guard(tensors)
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


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """The L2 norm of each tensor of one device, still there; not finite where an element is not."""
    with torch.no_grad():
        return torch.stack(torch_ops.norms([readable(tensor) for tensor in tensors]))


def number(tensor: Tensor) -> float | None:
    """A one-element tensor as a float, without a torch operation; None where only torch can read it."""
    return _native.number(tensor) if NATIVE else None


def any_nonzero(tensors: Sequence[Tensor | None], limit_elements: int = 4096) -> bool:
    """Is any element not zero? Looks at the first `limit_elements` of each tensor and stops at the first that it finds."""
    if NATIVE:
        found, rest = _native.any_nonzero(tensors, limit_elements)
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


def exponents(tensor: Tensor) -> tuple[list[int], list[int]] | None:
    """The power-of-two histogram: each floor(log2 |x|) among the non-zero finite elements, and how many have it; None where unsupported.

    float64 is clamped to the exponents of float32, -149 to 127. A tensor on a device is waited for.
    """
    pairs = exponent_pairs(tensor, 0)
    if pairs is None:
        return None
    table = np.frombuffer(pairs).reshape(-1, 2).astype(int).T.tolist()
    return table[0], table[1]


def exponent_pairs(tensor: Tensor, limit_elements: int) -> bytes | None:
    """The same as float64 in memory: an exponent and its count, and so on. Of more than `limit_elements` (0: no limit) about so many are
    counted, evenly spaced."""
    if NATIVE:
        found = _native.exponents(tensor, limit_elements)
        if found is not None:
            return found
    try:
        plain = readable(tensor)
        if limit_elements and plain.layout is torch.strided and plain.numel() > limit_elements:
            plain = _samples(plain, limit_elements)
        counts = torch_ops.exponents(plain) if plain.numel() else []
    except Exception:
        return None
    pairs = [(i + torch_ops.LOWEST_EXPONENT, count) for i, count in enumerate(counts) if count]
    return np.array(pairs, np.float64).tobytes()


def fingerprint(tensor: Tensor) -> int | None:
    """52 bits that tell contents apart (a float64 holds them exactly): equal for equal dtype, shape and elements, whatever the strides.

    Up to `WHOLE_BYTES` every element counts, above it evenly spaced samples. None where unsupported, and for tensors on a device: they
    would have to be waited for.
    """
    try:
        plain = readable(tensor)
        if plain.device.type != "cpu" or plain.layout is not torch.strided:
            return None
        with torch.no_grad():
            digest = hashlib.blake2b(f"{plain.dtype}{tuple(plain.shape)}".encode(), digest_size=8)
            if plain.nbytes <= WHOLE_BYTES and plain.dtype in _IN_NUMPY and plain.is_contiguous() and not plain.is_neg():
                digest.update(plain.detach().numpy().data)  # the common case: no other torch operation
                return int.from_bytes(digest.digest(), "little") >> 12
            content = _samples(plain, NUM_SAMPLES) if plain.nbytes > WHOLE_BYTES else plain
            content = content.contiguous().resolve_conj().resolve_neg().reshape(-1)
            digest.update(content.view(torch.uint8).numpy().data)
    except Exception:
        return None
    return int.from_bytes(digest.digest(), "little") >> 12


def supported(tensor: Tensor) -> str | None:
    """None where the tensor can be measured, else the reason in words."""
    try:
        readable(tensor)
    except Exception as error:
        return reason(error)
    return None


def _rest(indices: list[int] | None) -> Sequence[int]:
    return indices or ()


def _alike(plain: Tensor, copy: Tensor) -> bool:
    return (
        plain.shape == copy.shape
        and plain.dtype == copy.dtype
        and plain.device == copy.device
        and plain.is_contiguous() == copy.is_contiguous()
    )


def _samples(plain: Tensor, num: int) -> Tensor:
    index = torch.arange(num, dtype=torch.int64, device=plain.device) * (plain.numel() // num)
    return plain[torch.unravel_index(index, plain.shape)]


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
