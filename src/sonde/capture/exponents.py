"""Power-of-two histograms: how many elements of a tensor have which exponent. Rows of (site, exponent, count), a few per tensor."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch

from sonde.capture import kernel
from sonde.capture.journal import Journal
from sonde.record import EXPONENT_FIELDS, Kind

MOST_ELEMENTS = 1 << 16  # of one tensor: a histogram needs no more, and counting millions would cost more than all other statistics


class Exponents:
    """The histograms that a probe takes in one step."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[int, int, int]]] = {}

    def take(self, kind: str, site_id: int, tensor: torch.Tensor) -> None:
        histogram = kernel.exponents(tensor, MOST_ELEMENTS) if tensor.is_cpu else None  # on a device it would have to be waited for
        if histogram is not None:
            self._rows.setdefault(kind, []).extend((site_id, exponent, count) for exponent, count in zip(*histogram))

    def write(self, journal: Journal, step: int) -> None:
        for kind, rows in self._rows.items():
            table = np.fromiter(chain.from_iterable(rows), np.float64, 3 * len(rows)).reshape(-1, 3)
            plan = journal.plan(kind + Kind.EXPONENTS, EXPONENT_FIELDS, table[:, 0].astype(int).tolist())
            journal.frame(plan, step, table[:, 1:])

    def clear(self) -> None:
        self._rows.clear()
