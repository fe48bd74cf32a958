"""The alarm: what is done when the guard has found a bad loss or gradient. The step is looked back at, and the answer goes into the run.

Looking back is another room's work and is reached by the public door, loaded only now: a healthy training never pays for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

import sonde
from sonde.capture.journal import Journal
from sonde.capture.kept import Kept
from sonde.capture.source import user_frame
from sonde.config import DebugConfig
from sonde.errors import NonFiniteError, SondeError

MAX_LOOKS = 3  # in one run: the first bad step, and again after the training has recovered

_log = logging.getLogger("sonde")


class Alarm:
    def __init__(
        self,
        journal: Journal,
        config: DebugConfig,
        kept: Kept,
        models: Callable[[], Mapping[str, nn.Module]],
        live: Callable[[], Iterable[tuple[nn.Module, Optimizer | None]]],
        run: Path,
    ) -> None:
        self._journal, self._config, self._kept, self._models, self._live, self._run = journal, config, kept, models, live, run
        self._num_looks = 0
        self._last_bad_step = -2
        self._origin: Any = None  # that was found last

    def ring(self, what: str, loss: Tensor | None) -> None:
        step = self._kept.step
        follows = step - self._last_bad_step <= 1  # from a bad step that was looked at already
        self._last_bad_step = step
        reason = ""
        if not follows and self._num_looks < MAX_LOOKS:
            self._num_looks += 1
            reason = self._look(what, loss)
            if self._origin is None and not reason:
                self._last_bad_step = -2
                return  # the training deals with it: a GradScaler skips the step
        if self._config.anomaly_detection_mode == "raise":
            bad = f"the {what} of step {step} is not finite" + (f" ({self._kept.where})" if what == "gradient" else "")
            found = self._origin.summary() if self._origin is not None else f"Where it was made could not be found: {reason or 'unknown'}."
            raise NonFiniteError(f"{bad}. Training was stopped before the update.\n{found}", self._origin)

    def _look(self, what: str, loss: Tensor | None) -> str:
        """Looks back and writes down what was found. Answers why nothing was, where nothing was."""
        kept, began, reason = self._kept, perf_counter_ns(), ""
        self._origin = None
        try:
            self._origin = sonde.look_back(kept, frame=user_frame(), loss=loss, what=what, models=self._models())
        except SondeError as error:
            reason = str(error)
        except Exception as error:  # the training must not suffer from what was meant to explain it
            reason = f"looking back failed ({type(error).__name__}: {error})"[:1000]
        about = {"what": what, "bad": kept.where, "look_back_ms": round((perf_counter_ns() - began) / 1e6, 3)}
        if self._origin is None:
            if reason:
                self._journal.event("origin_unknown", kept.step, reason=reason, **about)
                _log.warning("sonde: the %s of step %d is not finite; where it was made could not be found: %s", what, kept.step, reason)
            return reason
        if self._config.save_debug_info:
            about["capsule"] = self._capsule(what)
        self._journal.event("origin", kept.step, **self._origin.to_dict(), **about)
        _log.warning("sonde: the %s of step %d is not finite. %s: %s", what, kept.step, self._origin.place, self._origin.cause)
        return ""

    def _capsule(self, what: str) -> str:
        """Keeps the step for another machine; answers where, or why not."""
        kept, config = self._kept, self._config
        optimizer = next((each for _, each in self._live() if each is not None), None)
        try:
            path = sonde.keep_capsule(
                kept, self._run / "capsules", frame=user_frame(), what=what, optimizer=optimizer, origin=self._origin,
                max_mb=config.max_capsule_mb,
            )  # fmt: skip
            return str(path.relative_to(self._run))
        except Exception as error:
            _log.warning("sonde: no capsule of step %d could be kept: %s", kept.step, error)
            return f"(not kept: {error})"[:500]
