"""A table of statistics, one row per tensor.

The native extension measures CPU tensors of the usual floating dtypes; torch operations measure the others and give the same numbers, which
stay on their device until `StatisticsTable.synchronize`. No tensor causes an exception, is changed or kept alive.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sonde.events import STATISTICS
from sonde.statistics import batched_device_reads, native_extension, statistics_without_extension
from sonde.statistics.statistics_without_extension import has_own_dispatch, measurable, reason


class StatisticsTable:
    """Rows of `STATISTICS` in the array `values`, allocated once and overwritten at every observed step. A missing tensor gives a row of
    zeros. So does one that cannot be measured; `unsupported` then holds the reason."""

    __slots__ = ("deferred", "unsupported", "values")

    def __init__(self, num_rows: int) -> None:
        self.values: npt.NDArray[np.float64] = np.zeros((num_rows, len(STATISTICS)), dtype=np.float64)
        self.unsupported: dict[int, str] = {}
        self.deferred: dict[int, Tensor] = {}  # results of torch by row, until `synchronize`

    def measure(self, first_row: int, tensors: Sequence[Tensor | None]) -> None:
        """Measure each tensor into a row, from `first_row` on. Rows that torch computes are written by `synchronize`."""
        if self.deferred:
            self.forget(range(first_row, first_row + len(tensors)))
        if native_extension.ENABLED:
            unhandled: Sequence[int] = native_extension.extension.measure(self.values, first_row, tensors) or ()
        else:
            unhandled = range(len(tensors))
        self.measure_by_torch(first_row, unhandled, tensors)

    def measure_one(self, row: int, tensor: Tensor) -> None:
        """The same for one tensor."""
        if self.deferred:
            self.deferred.pop(row, None)
        if not (native_extension.ENABLED and native_extension.extension.measure_one(self.values, row, tensor)):
            self._measure_one_by_torch(row, tensor)

    def finite_check(self) -> tuple[float, int] | None:
        """The result of `check_finite` for the measured tensors, computed from these rows; None where not all rows are known."""
        if self.deferred or self.unsupported or not native_extension.ENABLED:
            return None
        return native_extension.extension.check_finite_rows(self.values)

    def synchronize(self) -> None:
        """Write the rows that torch computed since the last call, in one transfer per device."""
        if self.deferred:
            batched_device_reads.fetch_all(self.pending())

    def pending(self) -> list[tuple[Tensor, batched_device_reads.Use]]:
        """The results of torch since the last call, each with the function that writes it, to fetch those of several tables together."""
        pending, self.deferred = self.deferred, {}
        return [(result, partial(self._write, row)) for row, result in pending.items()]

    def _write(self, row: int, numbers: Sequence[float] | Exception) -> None:
        if isinstance(numbers, Exception):
            self._set_unsupported(row, numbers)
        else:
            self.values[row] = numbers

    def measure_by_torch(
        self, first_row: int, indices: Iterable[int], tensors: Sequence[Tensor | None], minus: Sequence[Tensor | None] | None = None
    ) -> None:
        """Measure the tensors at these indices, or their differences to those of `minus`, into rows counted from `first_row`."""
        for i in indices:
            self._measure_one_by_torch(first_row + i, tensors[i], None if minus is None else minus[i])

    def _measure_one_by_torch(self, row: int, tensor: Tensor | None, minus: Tensor | None = None) -> None:
        self.values[row] = 0.0
        if tensor is None:
            return
        try:
            plain = measurable(tensor)
            is_handled = native_extension.ENABLED and minus is None and not has_own_dispatch(plain)
            if is_handled and native_extension.extension.measure_one(self.values, row, plain):
                return  # the tensor is of a subclass, but has ordinary memory
            result = statistics_without_extension.statistics(plain, minus)
        except Exception as error:  # an error in a user's tensor class must not stop the training
            self._set_unsupported(row, error)
            return
        if result is not None:
            self.deferred[row] = result

    def _set_unsupported(self, row: int, error: Exception) -> None:
        self.values[row] = 0.0
        self.unsupported[row] = reason(error)

    def forget(self, rows: Iterable[int]) -> None:
        """Drop the pending results of these rows."""
        for row in rows:
            self.deferred.pop(row, None)


def measure_columns(tensors: Sequence[Tensor | None]) -> dict[str, npt.NDArray[np.float64]]:
    """`STATISTICS` of these tensors by name, each with one entry per tensor. Waits for tensors on a device."""
    table = StatisticsTable(len(tensors))
    table.measure(0, tensors)
    table.synchronize()
    return dict(zip(STATISTICS, table.values.T))
