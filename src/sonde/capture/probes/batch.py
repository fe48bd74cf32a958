"""What went in: shape, range, non-finite values and a content hash of the tensors in a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from sonde.capture import kernel
from sonde.capture.far import is_far
from sonde.capture.probes.probe import Probe, Tools
from sonde.capture.tensors import tensors_in
from sonde.capture.watched import Watched
from sonde.record import BATCH_FIELDS, Kind, Site
from sonde.run.format import FramePlan

MAX_TENSORS = 8  # of one batch, and of one model's inputs
ALL_OF_THE_FIRST = 16  # observed steps; then one in EVERY: hashing a batch costs as much as all statistics of a small layer
EVERY = 4


class Batch(Probe):
    name = "batch"

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self.wanted = tools.measured.batches
        self._sites: dict[str, Site | None] = {}
        self._rows = kernel.Rows(2 * MAX_TENSORS)
        self._extra = np.zeros((2 * MAX_TENSORS, 2))
        self._taken: list[Site] = []
        self._plan: tuple[list[int], FramePlan] | None = None
        self._num_steps = 0
        self._looks = True
        self._fetched: set[int] = set()  # ids of tensors that the loader handed out: as inputs they are not measured again

    def begin(self, step: int, *, with_exponents: bool) -> None:
        self._num_steps += 1
        self._looks = self._num_steps <= ALL_OF_THE_FIRST or self._num_steps % EVERY == 0 or self._tools.measured.in_full

    def fetched(self, batch: Any) -> None:
        self._fetched.clear()
        if not self._looks:
            return
        for place, tensor in tensors_in(batch)[:MAX_TENSORS]:
            self._take(f"batch.{place}", tensor)
            self._fetched.add(id(tensor))

    def entered(self, watched: Watched, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._looks:
            return
        for place, tensor in tensors_in((args, kwargs))[:MAX_TENSORS]:
            if id(tensor) not in self._fetched:
                self._take(f"input.{place.partition('.')[2]}", tensor)

    def tables(self) -> Iterable[kernel.Rows]:
        return (self._rows,)

    def write(self, step: int) -> None:
        if self._taken:
            num = len(self._taken)
            ids = [site.id for site in self._taken]
            if self._plan is None or self._plan[0] != ids:
                self._plan = (ids, self._journal.plan(Kind.BATCH, BATCH_FIELDS, ids))
            self._journal.frame(self._plan[1], step, np.hstack([self._rows.values[:num], self._extra[:num]]))

    def clear(self) -> None:
        self._taken.clear()

    def _take(self, path: str, tensor: torch.Tensor) -> None:
        row = len(self._taken)
        if row >= len(self._extra) or any(site.path == path for site in self._taken):
            return
        if path not in self._sites:
            reason = kernel.supported(tensor)
            self._sites[path] = None if reason else self._journal.site(
                kind="input", path=path, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch.")
            )  # fmt: skip
        site = self._sites[path]
        if site is not None:
            self._rows.measure_one(row, tensor)
            fingerprint = kernel.fingerprint(tensor) if not is_far(tensor) else None
            self._extra[row] = (tensor.shape[0] if tensor.dim() else 1, np.nan if fingerprint is None else fingerprint)
            self._taken.append(site)
