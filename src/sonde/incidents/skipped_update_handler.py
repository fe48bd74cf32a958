"""A GradScaler skips an update: which gradients overflowed, and at low scales why.

A GradScaler is made for skipping, so nothing is stopped and nothing is logged.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isnan
from typing import Any

from sonde.capture.incident_types import Incident, SkippedUpdateIncident
from sonde.capture.user_source_line import user_frame
from sonde.events import UpdateSkipped
from sonde.incidents import HandlerContext
from sonde.incidents.search_cause_in_child import Search
from sonde.replay.forked_child import ChildAnswer
from sonde.replay.loss_scale_overflow import explain_overflow
from sonde.statistics.tensor_statistics_table import measure_columns

MAX_RECORDED = 16  # skipped updates; how many there are is counted anyway
SEARCH_BELOW = (1024.0, 1.0)  # scales: from the usual 65536 a healthy one settles after a few halvings. One search at each of these
SEARCH_NAN_BELOW = 8192.0  # the same where a gradient holds NaN, which a scale alone seldom makes


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
        columns = measure_columns([p.grad for p in incident.parameters])
        bad = [p for p, num in zip(incident.parameters, columns["nan"] + columns["inf"]) if num]
        num_nan = int(columns["nan"].sum())
        is_first = len(self._search_below) == len(SEARCH_BELOW)
        should_search = is_low and (scale <= self._search_below[0] or (num_nan > 0 and is_first))
        self._num_recorded += 1
        if self._num_recorded > MAX_RECORDED and not should_search:
            return
        tracker = self._context.tracker
        event = UpdateSkipped(
            where=tracker.models.parameter_name(bad[-1]) if bad else "",  # backward reaches the last ones first
            num_bad=len(bad), num_parameters=len(incident.parameters), num_nan=num_nan, scale=scale, scale_after=scale * incident.backoff,
        )  # fmt: skip
        if should_search:
            self._search_below.pop(0)
            self._search(event, incident.step)
        else:
            tracker.recorder.emit(event, incident.step)

    def _search(self, event: UpdateSkipped, step: int) -> None:
        """Run the step again in a child process; the event is recorded with what is found."""
        tracker, models = self._context.tracker, self._context.models_by_name()
        buffer = tracker.buffer
        frame = buffer.backward_frame or user_frame()

        def work(preliminary: Callable[[Mapping[str, Any]], None]) -> Mapping[str, Any]:
            found = explain_overflow(buffer, frame=frame, scale=event.scale, models=models)
            return {"by": found.by, "origin": found.origin.to_dict() if found.origin else None, "reason": found.reason}

        def on_answer(answer: ChildAnswer, search_ms: float) -> None:
            found = answer.data or {"by": "", "origin": None, "reason": answer.failure}
            tracker.recorder.emit(replace(event, **found, search_ms=search_ms), step)

        self._context.searches.start(Search(f"the cause of the skipped update in step {step}", work, on_answer), buffer.calls)
