"""Copies of parameters from before an update, to measure what the update changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sonde.statistics import native
from sonde.statistics.table import StatisticsTable
from sonde.statistics.torch_ops import Unsupported, readable
from sonde.statistics.torch_ops import reason as describe_error


class ParameterSnapshot:
    """Copies of parameters, to measure what an update changed. Allocated at the first `take`, then written over and over.

    Where the copies would take more than `limit_bytes`, `available` turns False for good, `reason` says why, and `take` only measures.
    """

    __slots__ = ("_copies", "available", "limit_bytes", "num_bytes", "reason")

    def __init__(self, limit_bytes: float) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.available = True
        self.reason = ""
        self._copies: list[Tensor | None] = []

    def take(self, tensors: Sequence[Tensor | None], rows: StatisticsTable, first_row: int) -> None:
        """Measure the tensors as they are now, and remember them."""
        if not self.available:
            rows.measure(first_row, tensors)
            return
        if len(self._copies) != len(tensors):
            self.release()
            self._copies = [None] * len(tensors)
        if rows.deferred:
            rows.forget(range(first_row, first_row + len(tensors)))
        rest = (native.extension.keep(rows.values, first_row, tensors, self._copies) or ()) if native.ENABLED else range(len(tensors))
        for i in rest:
            tensor = tensors[i]
            self._remember(i, tensor)
            if tensor is None:
                rows.values[first_row + i] = 0.0
            else:
                rows.measure_one(first_row + i, tensor)

    def diff(self, tensors: Sequence[Tensor | None], rows: StatisticsTable, first_row: int) -> None:
        """Measure the tensors minus what they were at the last `take`. What was not kept gives zeros."""
        copies = self._copies
        if rows.deferred:
            rows.forget(range(first_row, first_row + len(tensors)))
        if len(copies) != len(tensors):
            rows.values[first_row : first_row + len(tensors)] = 0.0
            return
        for i in (native.extension.change(rows.values, first_row, tensors, copies) or ()) if native.ENABLED else range(len(tensors)):
            copy = copies[i]
            rows.measure_by_torch(first_row + i, tensors[i] if copy is not None else None, copy)

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
            self._refuse(describe_error(error))

    def _refuse(self, why: str) -> None:
        self.available = False
        self.reason = why
        self.release()


def _alike(plain: Tensor, copy: Tensor) -> bool:
    return (
        plain.shape == copy.shape
        and plain.dtype == copy.dtype
        and plain.device == copy.device
        and plain.is_contiguous() == copy.is_contiguous()
    )
