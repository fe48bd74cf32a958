"""Power-of-two histograms: how many elements of a tensor have which exponent. Rows of (site, exponent, count), a few per tensor."""

from __future__ import annotations

import numpy as np
import torch

from sonde.capture.recorder import Journal
from sonde.events import EXPONENT_FIELDS, Kind
from sonde.statistics import exponent_histogram
from sonde.statistics.deferred_reads import on_device

PAIR_BYTES = 16  # an exponent and a count
MOST_ELEMENTS = 1 << 14  # of one tensor: a histogram needs no more, and counting millions would cost more than all other statistics


class Exponents:
    """The histograms that a probe takes in one step."""

    def __init__(self) -> None:
        self._taken: dict[str, dict[int, bytes]] = {}  # by kind and site: pairs
        self._num_missed = 0
        self._is_told = False

    def take(self, kind: str, site_id: int, tensor: torch.Tensor) -> None:
        if on_device(tensor):  # it would have to be waited for
            return
        pairs = exponent_histogram.exponent_pairs(tensor, MOST_ELEMENTS)
        self._num_missed += pairs is None
        if pairs:
            self._taken.setdefault(kind, {})[site_id] = pairs

    def write(self, journal: Journal, step: int) -> None:
        if self._num_missed and not self._is_told:
            self._is_told = True
            reason = f"no histogram could be taken of {self._num_missed} tensors"
            journal.event("unobserved", step, probe="exponents", where="", reason=reason)
        for kind, taken in self._taken.items():
            sites = np.repeat(list(taken), [len(pairs) // PAIR_BYTES for pairs in taken.values()])
            plan = journal.plan(kind + Kind.EXPONENTS, EXPONENT_FIELDS, sites)
            journal.frame(plan, step, np.frombuffer(b"".join(taken.values())).reshape(-1, 2))

    def clear(self) -> None:
        self._taken.clear()
        self._num_missed = 0
