"""Statistics of tensors in rows: planned once, written again at every observed step.

The native extension measures each tensor that it can read (CPU, the four common floating types, any strides); torch operations measure
the others and give the same numbers. Results of torch stay on their device until `StatisticsTable.synchronize`, which fetches all of them
in one transfer. Nothing here raises because of a tensor, changes one, or keeps one alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sonde.events import STATISTICS
from sonde.statistics import deferred_reads, native, torch_ops
from sonde.statistics.torch_ops import readable, reason


class StatisticsTable:
    """Rows of `STATISTICS`, planned once and written again at every observed step. The array is `values`.

    A tensor that cannot be measured leaves a row of zeros, as a missing one does, and its reason in `unsupported`.
    """

    __slots__ = ("deferred", "unsupported", "values")

    def __init__(self, num_rows: int) -> None:
        self.values: npt.NDArray[np.float64] = np.zeros((num_rows, len(STATISTICS)), dtype=np.float64)
        self.unsupported: dict[int, str] = {}
        self.deferred: dict[int, Tensor] = {}  # what torch has computed for a row, until `synchronize`

    def measure(self, first_row: int, tensors: Sequence[Tensor | None]) -> None:
        """One row per tensor, from `first_row` on. Rows that torch computes are written by `synchronize`."""
        if self.deferred:
            self.forget(range(first_row, first_row + len(tensors)))
        for i in (native.extension.measure(self.values, first_row, tensors) or ()) if native.ENABLED else range(len(tensors)):
            self.measure_by_torch(first_row + i, tensors[i])

    def measure_one(self, row: int, tensor: Tensor) -> None:
        if self.deferred:
            self.deferred.pop(row, None)
        if not (native.ENABLED and native.extension.measure_one(self.values, row, tensor)):
            self.measure_by_torch(row, tensor)

    def finite_check(self) -> tuple[float, int] | None:
        """What `check_finite` would say of the tensors behind these rows, without reading them again; None where that is not known yet."""
        return None if self.deferred or self.unsupported or not native.ENABLED else native.extension.guard_rows(self.values)

    def synchronize(self) -> None:
        """Write what torch computed since the last call: one transfer per device, none where all was native."""
        if self.deferred:
            deferred_reads.fetch_all(self.pending())

    def pending(self) -> list[tuple[Tensor, deferred_reads.Use]]:
        """The same for several tables in one transfer: what torch computed since the last call, and how it is written."""
        pending, self.deferred = self.deferred, {}
        return [(result, partial(self._write, row)) for row, result in pending.items()]

    def _write(self, row: int, numbers: Sequence[float] | Exception) -> None:
        if isinstance(numbers, Exception):
            self._give_up([row], numbers)
        else:
            self.values[row] = numbers

    def measure_by_torch(self, row: int, tensor: Tensor | None, minus: Tensor | None = None) -> None:
        self.values[row] = 0.0
        if tensor is None:
            return
        try:
            plain = readable(tensor)
            if native.ENABLED and minus is None and plain is not tensor and native.extension.measure_one(self.values, row, plain):
                return  # a subclass with ordinary memory below it
            result = torch_ops.statistics(plain, minus)
        except Exception as error:  # whatever a stranger's tensor does, the training goes on
            self._give_up([row], error)
            return
        if result is not None:
            self.deferred[row] = result

    def _give_up(self, rows: Iterable[int], error: Exception) -> None:
        for row in rows:
            self.values[row] = 0.0
            self.unsupported[row] = reason(error)

    def forget(self, rows: Iterable[int]) -> None:
        for row in rows:
            self.deferred.pop(row, None)
