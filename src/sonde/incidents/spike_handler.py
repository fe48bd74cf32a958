"""A loss or gradient norm far above the usual: the step is run again, a few times in a run, to find the samples or layers behind it.

Nothing is stopped and nothing is logged meanwhile: most spikes pass.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

from sonde.capture.call_site import user_frame
from sonde.capture.incident_types import Incident, SpikeIncident
from sonde.events import SpikeDetected
from sonde.incidents import HandlerContext
from sonde.replay.spike_attribution import attribute_spike

MAX_SEARCHES = 3  # in one run

_FIELDS = {"usual": "median", "without": "value_without_samples", "odd": "deviation"}  # keys of the log and their fields


class SpikeHandler:
    """Attributes spikes to samples and layers."""

    def __init__(self, context: HandlerContext) -> None:
        self._context = context
        self._num_searches = 0
        self._last_step = -1  # whose spike was searched: a spike of the gradient in the same step follows from that of the loss

    def __call__(self, incident: Incident) -> None:
        if not isinstance(incident, SpikeIncident) or self._num_searches >= MAX_SEARCHES or incident.step == self._last_step:
            return
        self._num_searches += 1
        self._last_step = incident.step
        buffer = self._context.tracker.buffer
        frame = user_frame() if incident.what == "loss" else buffer.backward_frame or user_frame()
        began = perf_counter_ns()
        found: dict[str, Any]
        try:
            models = self._context.models_by_name()
            found = attribute_spike(buffer, frame=frame, what=incident.what, leap=incident.leap, models=models).to_dict()
        except Exception as error:  # the training must not suffer from what was meant to explain it
            found = {"samples": None, "how": "", "caveats": [f"looking back failed ({type(error).__name__}: {error})"[:1000]]}
        facts = {_FIELDS.get(key, key): value for key, value in (incident.leap._asdict() | found).items()}
        search_ms = round((perf_counter_ns() - began) / 1e6, 3)
        event = SpikeDetected(what=incident.what, where=incident.where, **facts, search_ms=search_ms)
        self._context.tracker.recorder.emit(event, incident.step)
