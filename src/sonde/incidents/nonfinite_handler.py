"""The alarm: what is done when the guard has found a bad loss, gradient or output. The step is looked back at, and the answer goes into
the run.

Looking back is another room's work and is reached by the public door, loaded only now: a healthy training never pays for it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import perf_counter_ns
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

import sonde
from sonde.capture.call_site import user_frame
from sonde.capture.recorder import Journal
from sonde.capture.replay_buffer import ForwardCall, ReplayBuffer
from sonde.config import DebugConfig
from sonde.errors import NonFiniteError, SondeError

MAX_LOOKS = 3  # in one run: the first bad step, and again after the training has recovered; as many again in evaluation
MAX_JUDGED_MB = 64  # of a run that is read for the findings of a capsule: two seconds

_log = logging.getLogger("sonde")


class Alarm:
    def __init__(
        self,
        journal: Journal,
        config: DebugConfig,
        kept: ReplayBuffer,
        models: Callable[[], Mapping[str, nn.Module]],
        live: Callable[[], Iterable[tuple[nn.Module, Optimizer | None]]],
        run: Path,
    ) -> None:
        self._journal, self._config, self._kept, self._models, self._live, self._run = journal, config, kept, models, live, run
        self._num_looks = self._num_evaluations = 0
        self._last_bad_step = -2
        self._origin: Any = None  # that was found last
        self._origin_of_evaluation: Any = None

    def ring(self, what: str, loss: Tensor | None) -> None:
        step = self._kept.step
        follows = step - self._last_bad_step <= 1  # from a bad step that was looked at already
        self._last_bad_step = step
        reason = ""
        if not follows and self._num_looks < MAX_LOOKS:
            self._num_looks += 1
            # The function that called backward may have returned before the optimizer was called.
            self._origin, reason = self._look(self._kept, what, loss, self._kept.backward_frame or user_frame())
            if self._origin is None and not reason:
                self._last_bad_step = -2
                return  # the training deals with it: a GradScaler skips the step
        self._stop_if_asked(self._kept, what, self._origin, reason)

    def ring_for_evaluation(self, call: ForwardCall, step: int, only_inf: bool) -> bool:
        """What a model put out in evaluation. Answers whether it is bad: an Inf may be meant."""
        if self._num_looks:
            return not only_inf  # the training went bad before, and this follows
        kept, reason = ReplayBuffer(), ""
        kept.step, kept.where = step, call.model
        kept.calls.append(call)
        if self._origin_of_evaluation is None and self._num_evaluations < MAX_LOOKS:
            self._num_evaluations += 1
            self._origin_of_evaluation, reason = self._look(kept, "evaluation", None, user_frame(), silent=only_inf)
            if self._origin_of_evaluation is None and (not reason or only_inf):
                return False
        self._stop_if_asked(kept, "evaluation", self._origin_of_evaluation, reason)
        return True

    def _stop_if_asked(self, kept: ReplayBuffer, what: str, origin: Any, reason: str) -> None:
        if self._config.anomaly_detection_mode == "raise":
            before = "" if what == "evaluation" else " Training was stopped before the update."
            found = origin.summary() if origin is not None else f"Where it was made could not be found: {reason or 'unknown'}."
            raise NonFiniteError(f"{_said(kept, what)}.{before}\n{found}", origin)

    def _look(
        self, kept: ReplayBuffer, what: str, loss: Tensor | None, frame: FrameType | None, *, silent: bool = False
    ) -> tuple[Any, str]:
        """Looks back and writes down what was found. Answers that, or why nothing was; `silent`: which nobody needs to know."""
        began, reason, origin = perf_counter_ns(), "", None
        self._journal.flush()  # that it is bad is known, whatever becomes of the process while it looks
        try:
            origin = sonde.find_nonfinite_origin(kept, frame=frame, loss=loss, what=what, models=self._models())
        except SondeError as error:
            reason = str(error)
        except Exception as error:  # the training must not suffer from what was meant to explain it
            reason = f"looking back failed ({type(error).__name__}: {error})"[:1000]
        about = {"what": what, "bad": kept.where, "look_back_ms": round((perf_counter_ns() - began) / 1e6, 3)}
        if origin is None:
            if reason and not silent:
                self._journal.event("origin_unknown", kept.step, reason=reason, **about)
                _log.warning("sonde: %s; where it was made could not be found: %s", _said(kept, what), reason)
            return None, reason
        if self._config.save_debug_info:
            about["capsule"] = self._capsule(kept, what, origin, frame)
        kept.blamed_batch = None
        self._journal.event("origin", kept.step, **origin.to_dict(), **about)
        _log.warning("sonde: %s. %s: %s", _said(kept, what), origin.place, origin.cause)
        return origin, ""

    def _capsule(self, kept: ReplayBuffer, what: str, origin: Any, frame: FrameType | None) -> str:
        """Keeps the step for another machine; answers where, or why not."""
        optimizer = next((each for _, each in self._live() if each is not None), None)
        try:
            path = sonde.save_step_capsule(
                kept, self._run / "capsules", frame=frame, what=what, optimizer=optimizer, origin=origin, findings=self._findings(),
                max_mb=self._config.max_capsule_mb,
            )  # fmt: skip
            return str(path.relative_to(self._run))
        except Exception as error:
            _log.warning("sonde: no capsule of step %d could be kept: %s", kept.step, error)
            return f"(not kept: {error})"[:500]

    def _findings(self) -> list[dict[str, Any]]:
        """What the rules say of the run, up to the last step that is over."""
        try:
            if sum(log.stat().st_size for log in self._run.glob("*.sonde")) > MAX_JUDGED_MB * 2**20:
                return []
            found: list[dict[str, Any]] = json.loads(sonde.judge(self._run).to_json())["findings"]
            return found
        except Exception as error:
            _log.warning("sonde: the run could not be judged for its capsule: %s: %s", type(error).__name__, error)
            return []


def _said(kept: ReplayBuffer, what: str) -> str:
    """`the loss of step 41 is not finite`."""
    if what == "evaluation":
        return f"what {kept.where or 'the model'} put out in evaluation, at step {kept.step}, is not finite"
    return f"the {what} of step {kept.step} is not finite" + (f" ({kept.where})" if what == "gradient" else "")
