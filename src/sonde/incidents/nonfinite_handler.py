"""A bad loss, gradient or output: the step is run again to find the operation that made the first NaN or Inf.

The answer is an event, and with `save_debug_info` a capsule of the step. With `anomaly_detection_mode="raise"` the training is stopped.
"""

from __future__ import annotations

import json
import logging
from time import perf_counter_ns
from types import FrameType
from typing import Any

from torch import Tensor

from sonde.capture.call_site import user_frame
from sonde.capture.incident_types import EvaluationIncident, Incident, NonFiniteIncident
from sonde.capture.replay_buffer import ReplayBuffer
from sonde.errors import NonFiniteError, SondeError
from sonde.events import OriginFound, OriginUnknown
from sonde.incidents import HandlerContext
from sonde.nonfinite.origin import Origin
from sonde.replay.replay_step import find_nonfinite_origin, save_step_capsule
from sonde.report import judge

MAX_SEARCHES = 3  # in one run: the first bad step, and again after the training has recovered; as many again in evaluation
MAX_JUDGED_MB = 64  # of a run that is read for the findings of a capsule: two seconds

_log = logging.getLogger("sonde")


class NonFiniteHandler:
    """Searches for the origin of bad numbers, a few times in a run."""

    def __init__(self, context: HandlerContext) -> None:
        self._context, self._recorder = context, context.tracker.recorder
        self._num_searches = self._num_eval_searches = 0
        self._last_bad_step = -2
        self._origin: Origin | None = None  # that was found last
        self._eval_origin: Origin | None = None

    def __call__(self, incident: Incident) -> bool | None:
        if isinstance(incident, NonFiniteIncident):
            return self._handle(incident)
        return self._handle_evaluation(incident) if isinstance(incident, EvaluationIncident) else None

    def _handle(self, incident: NonFiniteIncident) -> bool | None:
        buffer, what, step = self._context.tracker.buffer, incident.event.what, incident.step
        buffer.step, buffer.where, buffer.scaled = step, incident.event.where, incident.is_loss_scaled
        is_consequence = step - self._last_bad_step <= 1  # of a bad step that was searched already
        self._last_bad_step = step
        reason = ""
        if not is_consequence and self._num_searches < MAX_SEARCHES:
            self._num_searches += 1
            # The function that called backward may have returned before the optimizer was called.
            frame = buffer.backward_frame or user_frame()
            self._origin, reason = self._search(buffer, what, incident.tensor if what == "loss" else None, frame)
            if self._origin is None and not reason:
                self._last_bad_step = -2
                return False  # the training deals with it: a GradScaler skips the step
        self._stop_if_asked(buffer, what, self._origin, reason)
        return None

    def _handle_evaluation(self, incident: EvaluationIncident) -> bool:
        if self._num_searches:
            return not incident.is_only_inf  # the training went bad before, and this follows
        buffer, reason = ReplayBuffer(), ""
        buffer.step, buffer.where = incident.step, incident.call.model
        buffer.calls.append(incident.call)
        if self._eval_origin is None and self._num_eval_searches < MAX_SEARCHES:
            self._num_eval_searches += 1
            self._eval_origin, reason = self._search(buffer, "evaluation", None, user_frame(), is_quiet=incident.is_only_inf)
            if self._eval_origin is None and (not reason or incident.is_only_inf):
                return False
        self._stop_if_asked(buffer, "evaluation", self._eval_origin, reason)
        return True

    def _stop_if_asked(self, buffer: ReplayBuffer, what: str, origin: Origin | None, reason: str) -> None:
        if self._context.config.anomaly_detection_mode == "raise":
            stopped = "" if what == "evaluation" else " Training was stopped before the update."
            found = origin.summary() if origin is not None else f"Where it was made could not be found: {reason or 'unknown'}."
            raise NonFiniteError(f"{_describe(buffer, what)}.{stopped}\n{found}", origin)

    def _search(
        self, buffer: ReplayBuffer, what: str, loss: Tensor | None, frame: FrameType | None, *, is_quiet: bool = False
    ) -> tuple[Origin | None, str]:
        """Run the step again and record what was found. Returns the origin, or the reason why there is none; `is_quiet`: which is not
        recorded then."""
        began, reason, origin = perf_counter_ns(), "", None
        self._recorder.flush()  # that it is bad is on disk, whatever becomes of the process during the search
        try:
            origin = find_nonfinite_origin(buffer, frame=frame, loss=loss, what=what, models=self._context.models_by_name())
        except SondeError as error:
            reason = str(error)
        except Exception as error:  # the training must not suffer from what was meant to explain it
            reason = f"looking back failed ({type(error).__name__}: {error})"[:1000]
        search_ms = round((perf_counter_ns() - began) / 1e6, 3)
        if origin is None:
            if reason and not is_quiet:
                self._recorder.emit(OriginUnknown(reason=reason, what=what, where=buffer.where, search_ms=search_ms), buffer.step)
                _log.warning("sonde: %s; where it was made could not be found: %s", _describe(buffer, what), reason)
            return None, reason
        capsule = self._save_capsule(buffer, what, origin, frame) if self._context.config.save_debug_info else None
        facts = origin.to_dict()
        facts["value_kind"] = facts.pop("kind")
        self._recorder.emit(OriginFound(**facts, what=what, where=buffer.where, search_ms=search_ms, capsule=capsule), buffer.step)
        _log.warning("sonde: %s. %s: %s", _describe(buffer, what), origin.place, origin.cause)
        return origin, ""

    def _save_capsule(self, buffer: ReplayBuffer, what: str, origin: Origin, frame: FrameType | None) -> str:
        """Store the step for another machine; returns its path, or why there is none."""
        optimizer = next((each for _, each in self._context.trained_models() if each is not None), None)
        try:
            path = save_step_capsule(
                buffer, self._context.run / "capsules", frame=frame, what=what, optimizer=optimizer, origin=origin,
                findings=self._findings(), max_mb=self._context.config.max_capsule_mb,
            )  # fmt: skip
            return str(path.relative_to(self._context.run))
        except Exception as error:
            _log.warning("sonde: no capsule of step %d could be kept: %s", buffer.step, error)
            return f"(not kept: {error})"[:500]

    def _findings(self) -> list[dict[str, Any]]:
        """What the rules find in the run, up to the last step that is over."""
        try:
            if sum(log.stat().st_size for log in self._context.run.glob("*.sonde")) > MAX_JUDGED_MB * 2**20:
                return []
            found: list[dict[str, Any]] = json.loads(judge(self._context.run).to_json())["findings"]
            return found
        except Exception as error:
            _log.warning("sonde: the run could not be judged for its capsule: %s: %s", type(error).__name__, error)
            return []


def _describe(buffer: ReplayBuffer, what: str) -> str:
    """`the loss of step 41 is not finite`."""
    if what == "evaluation":
        return f"what {buffer.where or 'the model'} put out in evaluation, at step {buffer.step}, is not finite"
    return f"the {what} of step {buffer.step} is not finite" + (f" ({buffer.where})" if what == "gradient" else "")
