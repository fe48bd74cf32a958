"""A bad loss, gradient or output: the step runs again in a child process to find the operation that made the first NaN or Inf.

The answer is an event, and with `save_debug_info` a capsule of the step. With `anomaly_detection_mode="raise"` the training is stopped.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from torch import Tensor

from sonde.capture.incident_types import EvaluationIncident, Incident, NonFiniteIncident
from sonde.capture.step_inputs_for_replay import ReplayBuffer
from sonde.capture.user_source_line import user_frame
from sonde.errors import NonFiniteError, SondeError
from sonde.events import OriginFound, OriginUnknown
from sonde.incidents import HandlerContext
from sonde.incidents.search_cause_in_child import Search
from sonde.nonfinite.origin_from_graph import origin_in_graph
from sonde.nonfinite.origin_types import Origin
from sonde.replay.capsule.capsule_file import CapsuleFiles
from sonde.replay.capsule.create_capsule import capsule_name
from sonde.replay.find_origin_by_replay import find_nonfinite_origin, write_step_capsule
from sonde.replay.forked_child import ChildAnswer
from sonde.report import diagnose

MAX_SEARCHES = 3  # in one run: the first bad step, and again after the training has recovered; as many again in evaluation
MAX_JUDGED_MB = 64  # of a run that is read for the findings of a capsule: two seconds

_log = logging.getLogger("sonde")


@dataclass(slots=True)
class _Answer:
    """The answer of one search, which may come later."""

    origin: Origin | None = None
    reason: str = ""  # why there is none; without one, the number is no incident
    has_come: bool = False


class NonFiniteHandler:
    """Searches for the origin of bad numbers, a few times in a run."""

    def __init__(self, context: HandlerContext) -> None:
        self._context, self._recorder = context, context.tracker.recorder
        self._raises = context.config.anomaly_detection_mode == "raise"
        self._num_searches = self._num_eval_searches = 0
        self._last_bad_step = -2
        self._answer, self._eval_answer = _Answer(), _Answer(has_come=True)

    def __call__(self, incident: Incident) -> bool | None:
        if isinstance(incident, NonFiniteIncident):
            return self._handle(incident)
        return self._handle_evaluation(incident) if isinstance(incident, EvaluationIncident) else None

    def poll(self) -> None:
        self._context.searches.poll()

    def close(self) -> None:
        self._context.searches.close()

    def _handle(self, incident: NonFiniteIncident) -> bool | None:
        buffer, what, step = self._context.tracker.buffer, incident.event.what, incident.step
        buffer.step, buffer.where, buffer.scaled = step, incident.event.where, incident.is_loss_scaled
        is_consequence = step - self._last_bad_step <= 1  # of a bad step that was searched already
        self._last_bad_step = step
        if not is_consequence and self._num_searches < MAX_SEARCHES:
            self._num_searches += 1
            # The function that called backward may have returned before the optimizer was called.
            frame = buffer.backward_frame or user_frame()
            self._answer = answer = self._search(buffer, what, incident.tensor if what == "loss" else None, frame, waits=self._raises)
            if answer.has_come and answer.origin is None and not answer.reason:
                self._last_bad_step = -2
                return False  # the training deals with it: a GradScaler skips the step
        self._stop_if_asked(buffer, what, self._answer)
        return None

    def _handle_evaluation(self, incident: EvaluationIncident) -> bool:
        if self._num_searches:
            return not incident.is_only_inf  # the training went bad before, and this follows
        buffer = ReplayBuffer()
        buffer.step, buffer.where = incident.step, incident.call.model
        buffer.calls.append(incident.call)
        if self._eval_answer.origin is None and self._eval_answer.has_come and self._num_eval_searches < MAX_SEARCHES:
            self._num_eval_searches += 1
            # Whether an Inf alone is meant decides whether there is an event, so that answer is waited for.
            waits, is_quiet = self._raises or incident.is_only_inf, incident.is_only_inf
            self._eval_answer = answer = self._search(buffer, "evaluation", None, user_frame(), waits=waits, is_quiet=is_quiet)
            if answer.has_come and answer.origin is None and (not answer.reason or incident.is_only_inf):
                return False
        self._stop_if_asked(buffer, "evaluation", self._eval_answer)
        return True

    def _stop_if_asked(self, buffer: ReplayBuffer, what: str, answer: _Answer) -> None:
        if self._raises:
            stopped = "" if what == "evaluation" else " Training was stopped before the update."
            unknown = f"Where it was made could not be found: {answer.reason or 'unknown'}."
            found = answer.origin.summary() if answer.origin is not None else unknown
            raise NonFiniteError(f"{_describe(what, buffer.step, buffer.where)}.{stopped}\n{found}", answer.origin)

    def _search(
        self, buffer: ReplayBuffer, what: str, loss: Tensor | None, frame: FrameType | None, *, waits: bool, is_quiet: bool = False
    ) -> _Answer:
        """Run the step again. What is found is recorded as soon as it is known; `is_quiet`: not if nothing is found."""
        self._recorder.flush()  # that it is bad is on disk, whatever becomes of the process during the search
        models, step, where = self._context.models_by_name(), buffer.step, buffer.where
        capsule = self._create_capsule(step) if self._context.config.save_debug_info else None
        files = capsule if isinstance(capsule, CapsuleFiles) else None
        optimizer = next((each for _, each in self._context.trained_models() if each is not None), None) if files else None
        answer = _Answer()
        graph_of = [loss]  # emptied below: a search that goes on must not keep the graph

        def work(preliminary: Callable[[Mapping[str, Any]], None]) -> Mapping[str, Any]:
            if (found := _origin_in_graph(loss, unpacks=True)) is not None:
                preliminary({"origin": found})
            origin = find_nonfinite_origin(buffer, frame=frame, loss=loss, what=what, models=models)
            if origin is None:
                return {"origin": None}
            failure = ""
            if files is not None:
                try:
                    limit = self._context.config.max_capsule_mb
                    findings = self._findings()
                    write_step_capsule(
                        files, buffer, frame=frame, what=what, optimizer=optimizer, origin=origin, findings=findings, max_mb=limit
                    )
                except Exception as error:
                    failure = str(error) or type(error).__name__
            return {"origin": origin.to_dict(), "capsule_failure": failure}

        def on_answer(given: ChildAnswer, search_ms: float) -> None:
            data, answer.reason, answer.has_come = given.data or {}, given.failure, True
            origin = data.get("origin") or _origin_in_graph(graph_of[0] if graph_of else None, unpacks=False)
            kept = _finish_capsule(capsule, data, self._context.run) if capsule is not None else None
            if origin is not None:
                caveats = [answer.reason] if answer.reason else []
                answer.origin, answer.reason = Origin.from_dict({**origin, "caveats": [*origin["caveats"], *caveats]}), ""
            elif not answer.reason:  # no incident: steps after it are searched again
                self._last_bad_step = -2 if self._last_bad_step == step else self._last_bad_step
            self._record(answer, what, step, where, search_ms, kept, is_quiet=is_quiet)

        name, keep = f"the origin of the bad number in step {step}", files.descriptors if files else ()
        self._context.searches.start(Search(name, work, on_answer, is_urgent=True, waits=waits, keep=keep), buffer.calls)
        graph_of.clear()
        return answer

    def _record(self, answer: _Answer, what: str, step: int, where: str, search_ms: float, capsule: str | None, *, is_quiet: bool) -> None:
        origin = answer.origin
        if origin is not None:
            facts = origin.to_dict()
            facts["value_kind"] = facts.pop("kind")
            self._recorder.emit(OriginFound(**facts, what=what, where=where, search_ms=search_ms, capsule=capsule), step)
            _log.warning("sonde: %s. %s: %s", _describe(what, step, where), origin.place, origin.cause)
        elif answer.reason and not is_quiet:
            self._recorder.emit(OriginUnknown(reason=answer.reason, what=what, where=where, search_ms=search_ms), step)
            _log.warning("sonde: %s; where it was made could not be found: %s", _describe(what, step, where), answer.reason)

    def _create_capsule(self, step: int) -> CapsuleFiles | str:
        """The files that the child writes the step into, or why there are none."""
        try:
            return CapsuleFiles(self._context.run / "capsules", capsule_name(step))
        except Exception as error:
            _log.warning("sonde: no capsule of step %d could be kept: %s", step, error)
            return f"(not kept: {error})"[:500]

    def _findings(self) -> list[dict[str, Any]]:
        """What the rules find in the run, up to the last step that is over."""
        if sum(log.stat().st_size for log in self._context.run.glob("*.sonde")) > MAX_JUDGED_MB * 2**20:
            return []
        with contextlib.suppress(Exception):  # a capsule without findings is better than none
            found: list[dict[str, Any]] = json.loads(diagnose(self._context.run).to_json())["findings"]
            return found
        return []


def _origin_in_graph(loss: Tensor | None, *, unpacks: bool) -> dict[str, Any] | None:
    """What the graph of the loss tells. `unpacks`: hooks of the user, which unpack what the graph has saved, may run."""
    with contextlib.suppress(Exception):
        found = origin_in_graph(loss, unpacks=unpacks) if loss is not None else None
        return replace(found, how="graph").to_dict() if found is not None else None
    return None


def _finish_capsule(capsule: CapsuleFiles | str, data: Mapping[str, Any], run: Any) -> str:
    """Give the capsule its name; returns its path, or why there is none."""
    if isinstance(capsule, str):
        return capsule
    failure = data.get("capsule_failure", "the step could not be run again")
    try:
        if not failure:
            return str(capsule.commit().relative_to(run))
        capsule.discard()
    except SondeError as error:
        failure = str(error)
    _log.warning("sonde: no capsule could be kept: %s", failure)
    return f"(not kept: {failure})"[:500]


def _describe(what: str, step: int, where: str) -> str:
    """`the loss of step 41 is not finite`."""
    if what == "evaluation":
        return f"what {where or 'the model'} put out in evaluation, at step {step}, is not finite"
    return f"the {what} of step {step} is not finite" + (f" ({where})" if what == "gradient" else "")
