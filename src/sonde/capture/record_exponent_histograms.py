"""Power-of-two histograms: the number of elements per exponent. Rows of (site, exponent, count), a few per tensor."""

import numpy as np
import torch

from sonde.capture.run_log_recorder import StepRecorder
from sonde.events import EXPONENT_FIELDS, Kind, NotMeasured
from sonde.statistics import exponent_histogram
from sonde.statistics.batched_device_reads import on_device

PAIR_BYTES = 16  # an exponent and a count
MAX_ELEMENTS = 1 << 14  # per tensor: enough for a histogram; counting millions would cost more than all other statistics


class ExponentHistograms:
    """Collects the histograms of one step for a probe."""

    def __init__(self) -> None:
        self._pairs: dict[str, dict[int, bytes]] = {}  # by kind and site
        self._num_missed = 0
        self._is_reported = False

    def add(self, kind: str, site_id: int, tensor: torch.Tensor) -> None:
        if on_device(tensor):  # reading it would wait for the device
            return
        pairs = exponent_histogram.exponent_pairs(tensor, MAX_ELEMENTS)
        self._num_missed += pairs is None
        if pairs:
            self._pairs.setdefault(kind, {})[site_id] = pairs

    def write(self, recorder: StepRecorder, step: int) -> None:
        if self._num_missed and not self._is_reported:
            self._is_reported = True
            reason = f"no histogram could be taken of {self._num_missed} tensors"
            recorder.emit(NotMeasured(probe="exponents", where="", reason=reason), step)
        pairs_by_kind, self._pairs = self._pairs, {}  # another thread that trains may add some meanwhile
        for kind, by_site in pairs_by_kind.items():
            sites = np.repeat(list(by_site), [len(pairs) // PAIR_BYTES for pairs in by_site.values()])
            plan = recorder.plan(kind + Kind.EXPONENTS, EXPONENT_FIELDS, sites)
            recorder.frame(plan, step, np.frombuffer(b"".join(by_site.values())).reshape(-1, 2))

    def clear(self) -> None:
        self._pairs.clear()
        self._num_missed = 0
