"""A loss or gradient norm far above the usual: the step runs again in a child process, a few times in a run, to find the samples or layers
behind it.

Nothing is stopped and nothing is logged meanwhile: most spikes pass.
"""

from collections.abc import Callable, Mapping
from typing import Any

from sonde.capture.incident_types import Incident, SpikeIncident
from sonde.capture.user_source_line import user_frame
from sonde.events import SpikeDetected
from sonde.incidents import HandlerContext
from sonde.incidents.search_cause_in_child import Search
from sonde.replay.forked_child import ChildAnswer
from sonde.replay.spike_attribution import attribute_spike, blame_gradients

MAX_SEARCHES = 3  # in one run
MAX_UNSEARCHED = 8  # spikes that are recorded while another search is running: later ones count as searched

_FIELDS = {"usual": "median", "without": "value_without_samples", "odd": "deviation"}  # keys of the log and their fields


class SpikeHandler:
    """Attributes spikes to samples and layers."""

    def __init__(self, context: HandlerContext) -> None:
        self._context = context
        self._num_searches = self._num_unsearched = 0
        self._last_step = -1  # whose spike was searched: a spike of the gradient in the same step follows from that of the loss

    def __call__(self, incident: Incident) -> None:
        if not isinstance(incident, SpikeIncident) or self._num_searches >= MAX_SEARCHES or incident.step == self._last_step:
            return
        self._num_searches += 1
        self._last_step = incident.step
        buffer, models = self._context.tracker.buffer, self._context.models_by_name()
        frame = user_frame() if incident.what == "loss" else buffer.backward_frame or user_frame()
        is_now = True

        def work(preliminary: Callable[[Mapping[str, Any]], None]) -> Mapping[str, Any]:
            preliminary(blame_gradients(models, incident.what, "it did not end").to_dict())
            return attribute_spike(buffer, frame=frame, what=incident.what, leap=incident.leap, models=models).to_dict()

        def on_answer(answer: ChildAnswer, search_ms: float) -> None:
            if answer.data is None and is_now and not self._context.tracker.gradients.in_threads:  # which may be writing gradients now
                found: Mapping[str, Any] = blame_gradients(models, incident.what, answer.failure).to_dict()
            else:
                found = answer.data or {"samples": None, "how": ""}
                if answer.failure:
                    found = {**found, "caveats": [f"the step could not be run again: {answer.failure}"]}
            facts = {_FIELDS.get(key, key): value for key, value in {**incident.leap._asdict(), **found}.items()}
            event = SpikeDetected(what=incident.what, where=incident.where, **facts, search_ms=search_ms)
            self._context.tracker.recorder.emit(event, incident.step)

        search = Search(f"the cause of the spike in step {incident.step}", work, on_answer)
        if not self._context.searches.start(search, buffer.calls) and self._num_unsearched < MAX_UNSEARCHED:
            self._num_unsearched += 1
            self._num_searches -= 1
        is_now = False  # later on, the gradients are those of other steps
