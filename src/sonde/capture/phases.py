"""Where a step's time goes, by a monotonic clock; what Sonde itself takes is kept apart.

Every moment belongs to exactly one phase: to the innermost that is under way, so the phases of a step and Sonde's own time add up to the
step. `torch.save` inside a validation is checkpointing, a batch that is fetched there is data, a backward inside of an optimizer's
closure is backward. Outside of all of them the time is validation from the first forward without gradients on, until the training
goes on; before and after that it is other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter_ns

from sonde.capture.journal import Journal
from sonde.capture.standins import Desk

OTHER, VALIDATION = "other_ms", "validation_ms"
_SCALARS = {phase: f"{phase}_ms" for phase in ("data", "transfer", "forward", "backward", "optimizer", "checkpoint")}
_UNKNOWN = dict.fromkeys((*_SCALARS.values(), OTHER, VALIDATION), math.nan)
_TRAINING = ("forward", "backward", "optimizer")  # one of these, and the validation is over


class Phases:
    def __init__(self, journal: Journal, desk: Desk) -> None:
        self._journal, self._desk = journal, desk
        self._under_way = [OTHER]  # innermost last
        self._mark_ns = 0  # up to here the time is accounted for, on a clock that stands still while Sonde works
        self.entered_ns = 0  # when Sonde was last called: since then the time is its own
        self._step_began = 0
        self.validating = False
        self.are_logged = True
        self.on_change: Callable[[str, bool], None] | None = None  # who else wants to know: of the phase, and whether it begins

    def begin(self, phase: str) -> None:
        if self.on_change is not None:
            self.on_change(phase, True)
        self._account()
        if self.validating and phase in _TRAINING:
            self.validating, self._under_way[0] = False, OTHER
        self._under_way.append(_SCALARS[phase])

    def finish(self, phase: str) -> None:
        """Ends when Sonde was called to hear of it. Our hooks inside the phase are not the phase's."""
        name = _SCALARS[phase]
        if name in self._under_way:
            self._account()
            self._under_way.remove(name)  # another thread may have begun something meanwhile
            if self.on_change is not None:
                self.on_change(phase, False)

    def validate(self) -> None:
        """A forward without gradients, before the step has trained anything."""
        if not self.validating:
            self._account()
            self.validating, self._under_way[0] = True, VALIDATION

    def touch(self) -> None:
        """The first step begins with the first call that belongs to a training, not when the script starts."""
        if not self._step_began:
            self._step_began = self._mark_ns = self.entered_ns
            self._desk.own_ns = 0  # what was Sonde's before is no part of the step

    def leave_out(self, ns: int) -> None:
        """That much time, just now, was nobody's: neither the training's nor part of what Sonde costs a step."""
        self.entered_ns += ns
        self._step_began += ns
        self._mark_ns += ns

    def begin_step(self) -> None:
        del self._under_way[1:]
        self._mark_ns = self._step_began = self.entered_ns = perf_counter_ns()
        self._desk.own_ns = 0

    def write(self) -> tuple[int, int]:
        """Writes the step's times; answers with its length and Sonde's part of it. What follows is counted to the next step: a frame
        cannot hold the time that its own writing takes."""
        self._account()
        now = perf_counter_ns()
        own_ns = self._desk.own_ns + now - self.entered_ns
        step_ns = now - self._step_began if self._step_began else 0
        del self._under_way[1:]
        self._mark_ns = self._step_began = self.entered_ns = now
        self._desk.own_ns = 0
        if not self.are_logged:
            self._journal.scalars.update(_UNKNOWN)
        self._journal.scalars["step_ms"] = step_ns / 1e6
        self._journal.scalars["sonde_ms"] = own_ns / 1e6
        return step_ns, own_ns

    def _account(self) -> None:
        """What has passed since the last change belongs to the innermost phase."""
        now = self.entered_ns - self._desk.own_ns
        if self._step_began and now > self._mark_ns:
            self._journal.scalars[self._under_way[-1]] += (now - self._mark_ns) / 1e6
        self._mark_ns = now
