"""The lookout: what is done when a loss or a gradient is far above the usual, and when a GradScaler skips a step.

As with a bad number the step is looked back at, a few times in a run, and the answer goes into the run. Nothing is stopped and nobody is
told meanwhile: most spikes pass, and a GradScaler is made for skipping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isnan
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn

import sonde
from sonde.capture.call_site import user_frame
from sonde.capture.model_registry import Models
from sonde.capture.recorder import Journal
from sonde.capture.replay_buffer import ReplayBuffer
from sonde.events import STATISTICS
from sonde.spike_detection import Leap
from sonde.statistics.table import StatisticsTable

MAX_LOOKS = 3  # at spikes, in one run
MAX_SKIPS = 16  # skipped steps that are told of; how many there are is counted anyway
LOOK_BELOW = (1024.0, 1.0)  # scales: from the usual 65536 a healthy one settles after a few halvings. One look at each of these
LOOK_AT_NAN_BELOW = 8192.0  # the same where a gradient holds NaN, which a scale alone seldom makes

_NAN, _INF = STATISTICS.index("nan"), STATISTICS.index("inf")


class Lookout:
    def __init__(self, journal: Journal, kept: ReplayBuffer, models: Models, bodies: Callable[[], Mapping[str, nn.Module]]) -> None:
        self._journal, self._kept, self._models, self._bodies = journal, kept, models, bodies
        self._num_looks = 0
        self._last_step = -1  # whose spike was looked at: a leap of the gradient in the same step follows from that of the loss
        self._num_skips = 0
        self._look_below = list(LOOK_BELOW)

    def spiked(self, what: str, where: str, leap: Leap, step: int) -> None:
        if self._num_looks >= MAX_LOOKS or step == self._last_step:
            return
        self._num_looks += 1
        self._last_step = step
        frame = user_frame() if what == "loss" else self._kept.backward_frame or user_frame()
        began = perf_counter_ns()
        try:
            found = sonde.attribute_spike(self._kept, frame=frame, what=what, leap=leap, models=self._bodies()).to_dict()
        except Exception as error:  # the training must not suffer from what was meant to explain it
            found = {"samples": None, "how": "", "caveats": [f"looking back failed ({type(error).__name__}: {error})"[:1000]]}
        self._journal.event("spike", step, what=what, where=where, **leap._asdict(), **found, look_back_ms=_ms_since(began))

    def skipped(self, parameters: Sequence[torch.Tensor], step: int, scale: float, backoff: float) -> None:
        """A GradScaler holds an optimizer back: who overflowed?"""
        low = not isnan(scale) and bool(self._look_below) and scale <= max(self._look_below[0], LOOK_AT_NAN_BELOW)
        if self._num_skips >= MAX_SKIPS and not low:
            return
        bad, num_nan = _bad(parameters)
        looks = low and (scale <= self._look_below[0] or (num_nan > 0 and len(self._look_below) == len(LOOK_BELOW)))
        self._num_skips += 1
        if self._num_skips > MAX_SKIPS and not looks:
            return
        site = self._models.parameter_site(bad[-1]) if bad else None  # backward comes to the last ones first
        about: dict[str, Any] = {
            "where": site.name if site else "", "num_bad": len(bad), "num_parameters": len(parameters), "num_nan": num_nan,
            "scale": scale, "scale_after": scale * backoff,
        }  # fmt: skip
        if looks:
            self._look_below.pop(0)
            about |= self._look(scale)
        self._journal.event("overflow", step, **about)

    def _look(self, scale: float) -> dict[str, Any]:
        began = perf_counter_ns()
        try:
            found = sonde.explain_overflow(self._kept, frame=self._kept.backward_frame or user_frame(), scale=scale, models=self._bodies())
            told = {"by": found.by, "origin": found.origin.to_dict() if found.origin else None, "reason": found.reason}
        except Exception as error:
            told = {"by": "", "origin": None, "reason": f"looking back failed ({type(error).__name__}: {error})"[:1000]}
        return {**told, "look_back_ms": _ms_since(began)}


def _bad(parameters: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """The parameters whose gradients are not finite, and how many NaN there are in these."""
    rows = StatisticsTable(len(parameters))
    rows.measure(0, [p.grad for p in parameters])
    rows.synchronize()
    counts = rows.values[:, [_NAN, _INF]]
    return [p for p, num in zip(parameters, counts.sum(axis=1)) if num], int(counts[:, 0].sum())


def _ms_since(began_ns: int) -> float:
    return round((perf_counter_ns() - began_ns) / 1e6, 3)
