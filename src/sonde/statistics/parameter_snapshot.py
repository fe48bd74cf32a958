"""Copies of parameters from before an update, to measure how the update changes them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sonde.statistics import native_extension
from sonde.statistics.statistics_without_extension import Unsupported, has_own_dispatch, measurable
from sonde.statistics.statistics_without_extension import reason as describe_error
from sonde.statistics.tensor_statistics_table import StatisticsTable


class ParameterSnapshot:
    """Copies parameters before an update and measures the difference after it. The copies are allocated at the first `take` and overwritten
    by later ones. If they would take more than `limit_bytes`, `available` becomes False for good, `reason` holds the cause, and `take` only
    measures."""

    __slots__ = ("_copies", "available", "limit_bytes", "num_bytes", "reason")

    def __init__(self, limit_bytes: float) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.available = True
        self.reason = ""
        self._copies: list[Tensor | None] = []

    def take(self, tensors: Sequence[Tensor | None], rows: StatisticsTable, first_row: int) -> None:
        """Measure the tensors as they are now into rows from `first_row` on, and copy them."""
        if not self.available:
            rows.measure(first_row, tensors)
            return
        if len(self._copies) != len(tensors):
            self.release()
            self._copies = [None] * len(tensors)
        if rows.deferred:
            rows.forget(range(first_row, first_row + len(tensors)))
        if native_extension.ENABLED:
            unhandled: Sequence[int] = native_extension.extension.snapshot(rows.values, first_row, tensors, self._copies) or ()
        else:
            unhandled = range(len(tensors))
        for i in unhandled:
            self._copy(i, tensors[i])
        rows.measure_by_torch(first_row, unhandled, tensors)

    def diff(self, tensors: Sequence[Tensor | None], rows: StatisticsTable, first_row: int) -> None:
        """Measure the tensors minus their copies of the last `take`. A tensor without a copy gives a row of zeros."""
        copies = self._copies
        if rows.deferred:
            rows.forget(range(first_row, first_row + len(tensors)))
        if len(copies) != len(tensors):
            rows.values[first_row : first_row + len(tensors)] = 0.0
            return
        if native_extension.ENABLED:
            unhandled: Sequence[int] = native_extension.extension.diff(rows.values, first_row, tensors, copies) or ()
        else:
            unhandled = range(len(tensors))
        with_copy = [None if copy is None else tensor for tensor, copy in zip(tensors, copies)] if unhandled else ()
        rows.measure_by_torch(first_row, unhandled, with_copy, copies)

    def release(self) -> None:
        """Free the copies."""
        self._copies = []
        self.num_bytes = 0

    def _copy(self, i: int, tensor: Tensor | None) -> None:
        if not self.available:
            return
        copy = self._copies[i]
        try:
            plain = None if tensor is None else measurable(tensor)
            if plain is not None and plain.layout is not torch.strided:
                plain = None  # of sparse parameters the update is not measured
            if copy is not None and (plain is None or _layout(plain) != _layout(copy)):
                self.num_bytes -= copy.nbytes
                copy = self._copies[i] = None
            if plain is None:
                return
            # A copy made in inference mode could not be written again after it.
            with torch.inference_mode(False), torch.no_grad():
                if copy is None:
                    if self.num_bytes + plain.nbytes > self.limit_bytes:
                        self._disable(f"copies of the parameters would take more than {self.limit_bytes / 2**20:g} MiB")
                        return
                    copy = torch.empty_like(plain, requires_grad=False)
                    self.num_bytes += copy.nbytes
                copy.copy_(plain)
            self._copies[i] = copy
        except Unsupported:
            self._copies[i] = None
        except Exception as error:  # most likely out of memory
            if tensor is not None and has_own_dispatch(tensor):
                self._copies[i] = None  # an operation that this class of tensors does not have
            else:
                self._disable(describe_error(error))

    def _disable(self, reason: str) -> None:
        self.available = False
        self.reason = reason
        self.release()


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous()
