"""A GradScaler skips an update: which gradients overflowed, and at low scales why.

A GradScaler is made for skipping, so nothing is stopped and nothing is logged.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from time import perf_counter_ns
from typing import Any

import torch

from sonde.capture.call_site import user_frame
from sonde.capture.incident_types import Incident, SkippedUpdateIncident
from sonde.events import STATISTICS, UpdateSkipped
from sonde.incidents import HandlerContext
from sonde.replay.loss_scale_overflow import explain_overflow
from sonde.statistics.tensor_statistics_table import StatisticsTable

MAX_RECORDED = 16  # skipped updates; how many there are is counted anyway
SEARCH_BELOW = (1024.0, 1.0)  # scales: from the usual 65536 a healthy one settles after a few halvings. One search at each of these
SEARCH_NAN_BELOW = 8192.0  # the same where a gradient holds NaN, which a scale alone seldom makes

_NAN, _INF = STATISTICS.index("nan"), STATISTICS.index("inf")


class SkippedUpdateHandler:
    """Records skipped updates and explains those at low scales."""

    def __init__(self, context: HandlerContext) -> None:
        self._context = context
        self._num_recorded = 0
        self._search_below = list(SEARCH_BELOW)

    def __call__(self, incident: Incident) -> None:
        if not isinstance(incident, SkippedUpdateIncident):
            return
        scale = incident.scale
        is_low = not isnan(scale) and bool(self._search_below) and scale <= max(self._search_below[0], SEARCH_NAN_BELOW)
        if self._num_recorded >= MAX_RECORDED and not is_low:
            return
        bad, num_nan = _find_bad(incident.parameters)
        is_first = len(self._search_below) == len(SEARCH_BELOW)
        should_search = is_low and (scale <= self._search_below[0] or (num_nan > 0 and is_first))
        self._num_recorded += 1
        if self._num_recorded > MAX_RECORDED and not should_search:
            return
        explanation: dict[str, Any] = {}
        if should_search:
            self._search_below.pop(0)
            explanation = self._explain(scale)
        tracker = self._context.tracker
        event = UpdateSkipped(
            where=tracker.models.parameter_name(bad[-1]) if bad else "",  # backward reaches the last ones first
            num_bad=len(bad), num_parameters=len(incident.parameters), num_nan=num_nan, scale=scale, scale_after=scale * incident.backoff,
            **explanation,
        )  # fmt: skip
        tracker.recorder.emit(event, incident.step)

    def _explain(self, scale: float) -> dict[str, Any]:
        began, buffer = perf_counter_ns(), self._context.tracker.buffer
        try:
            frame = buffer.backward_frame or user_frame()
            found = explain_overflow(buffer, frame=frame, scale=scale, models=self._context.models_by_name())
            facts = {"by": found.by, "origin": found.origin.to_dict() if found.origin else None, "reason": found.reason}
        except Exception as error:
            facts = {"by": "", "origin": None, "reason": f"looking back failed ({type(error).__name__}: {error})"[:1000]}
        return {**facts, "search_ms": round((perf_counter_ns() - began) / 1e6, 3)}


def _find_bad(parameters: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """The parameters whose gradients are not finite, and the number of NaN in them."""
    table = StatisticsTable(len(parameters))
    table.measure(0, [p.grad for p in parameters])
    table.synchronize()
    counts = table.values[:, [_NAN, _INF]]
    return [p for p, num in zip(parameters, counts.sum(axis=1)) if num], int(counts[:, 0].sum())
