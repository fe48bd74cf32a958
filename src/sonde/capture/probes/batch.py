"""What went in: shape, range, non-finite values and a content hash of the tensors in a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sonde.capture import kernel
from sonde.capture.journal import Journal
from sonde.capture.tensors import tensors_in
from sonde.record import BATCH_FIELDS, Kind, Site

MAX_TENSORS = 8  # of one batch


class Batch:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._sites: dict[str, Site | None] = {}
        self._rows = kernel.Rows(2 * MAX_TENSORS)
        self._extra = np.zeros((2 * MAX_TENSORS, 2))
        self._taken: list[Site] = []
        self._fetched: set[int] = set()  # ids of tensors that the loader handed out and that were measured as such

    def fetched(self, batch: Any, *, observed: bool) -> None:
        """A loader handed out a batch."""
        self._fetched.clear()
        if observed:
            for place, tensor in tensors_in(batch)[:MAX_TENSORS]:
                self._take(f"batch.{place}", tensor)
                self._fetched.add(id(tensor))

    def entered(self, args: Any, kwargs: Any, *, observed: bool) -> tuple[str, torch.Tensor] | None:
        """A model is about to use these. Answers with the first input that holds a non-finite value."""
        inputs = [("0", args[0])] if len(args) == 1 and type(args[0]) is torch.Tensor and not kwargs else tensors_in((args, kwargs))
        inputs = inputs[:MAX_TENSORS]
        if observed:
            for place, tensor in inputs:
                if id(tensor) not in self._fetched:
                    self._take(f"input.{place}", tensor)
        floating = [(place, tensor) for place, tensor in inputs if tensor.is_floating_point() and tensor.is_cpu]
        if not floating:
            return None
        _, bad = kernel.guard([tensor for _, tensor in floating])
        return (f"input.{floating[bad][0]}", floating[bad][1]) if bad >= 0 else None

    def write(self, step: int) -> None:
        if self._taken:
            self._rows.settle()
            num = len(self._taken)
            plan = self._journal.plan(Kind.BATCH, BATCH_FIELDS, [site.id for site in self._taken])
            self._journal.frame(plan, step, np.hstack([self._rows.values[:num], self._extra[:num]]))

    def clear(self) -> None:
        self._taken = []

    def _take(self, path: str, tensor: torch.Tensor) -> None:
        row = len(self._taken)
        if row >= len(self._extra):
            return
        if path not in self._sites:
            reason = kernel.supported(tensor)
            self._sites[path] = None if reason else self._journal.site(
                kind="input", path=path, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch.")
            )  # fmt: skip
        site = self._sites[path]
        if site is not None:
            self._rows.measure_one(row, tensor)
            fingerprint = kernel.fingerprint(tensor) if tensor.is_cpu else None
            self._extra[row] = (tensor.shape[0] if tensor.dim() else 1, np.nan if fingerprint is None else fingerprint)
            self._taken.append(site)


