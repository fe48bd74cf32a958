"""Memory grows: for a few steps the tensors that stay alive are followed, then their holders are named. It costs these steps some
milliseconds each."""

import sys
from dataclasses import replace
from time import perf_counter_ns

import torch

from sonde.capture import torch_patches
from sonde.capture.incident_types import Incident, MemoryGrowthIncident
from sonde.capture.training_callbacks import TrainingCallbacks
from sonde.events import LeaksInvestigated
from sonde.incidents import HandlerContext
from sonde.leaks.leak_detector import LeakDetector
from sonde.leaks.storing_line import find_storing_line

NUM_STEPS = 14  # that are followed: a few more than a trend needs
MAX_LEAKS = 3  # in the answer


class MemoryGrowthHandler:
    """Starts an investigation where memory grows; one answer is enough for a run."""

    def __init__(self, context: HandlerContext) -> None:
        self._context = context
        self._investigation: LeakInvestigation | None = None

    def __call__(self, incident: Incident) -> None:
        if not isinstance(incident, MemoryGrowthIncident):
            return
        if self._investigation is None or (self._investigation.is_over and not self._investigation.has_found):
            self._investigation = LeakInvestigation(self._context, incident.step)

    def close(self) -> None:
        if self._investigation is not None:
            self._investigation.close()


class LeakInvestigation(TrainingCallbacks):
    """Follows what stays alive from update to update, and records who holds it."""

    def __init__(self, context: HandlerContext, step: int) -> None:
        self._context, self._step = context, step
        self._num_left = NUM_STEPS
        self._own_ns = 0
        self._detector = LeakDetector()
        self.is_over = self.has_found = False
        torch_patches.subscribe(self)

    def close(self) -> None:
        """End it; without an answer where it was not over."""
        if not self.is_over:
            self.is_over = True
            torch_patches.unsubscribe(self)

    def on_optimizer_step_end(self, optimizer: torch.optim.Optimizer) -> None:
        tracker, began = self._context.tracker, perf_counter_ns()
        try:
            self._detector.step()
            self._num_left -= 1
            if self._num_left <= 0:
                self._answer(began)
                self.close()
        except Exception as error:
            self.close()
            tracker.isolation.report("leaks", "", error)
        finally:
            taken = perf_counter_ns() - began
            self._own_ns += taken
            tracker.timer.own_ns += taken

    def _answer(self, began: int) -> None:
        since = self._step + 1  # the detector counts from where it began
        found = [replace(leak, first_step=leak.first_step + since, last_step=leak.last_step + since) for leak in self._detector.leaks()]
        lines = [find_storing_line(leak.chain.links[0], sys._getframe()) for leak in found[:MAX_LEAKS]]
        leaks = [
            {
                "holder": leak.holder, "cause": leak.cause, "fix": leak.fix, "num_bytes": leak.num_bytes, "num_tensors": leak.num_tensors,
                "num_nodes": leak.num_nodes, "per_step_bytes": leak.per_step_bytes, "line": line, "text": text,
            }
            for leak, (line, text) in zip(found, lines)
        ]  # fmt: skip
        search_ms = round((self._own_ns + perf_counter_ns() - began) / 1e6, 3)
        self._context.tracker.recorder.emit(LeaksInvestigated(leaks=leaks, num_steps=NUM_STEPS, search_ms=search_ms), self._step)
        self.has_found = bool(leaks)
