"""Where a step's time goes, by a monotonic clock; what Sonde itself takes is kept apart.

Every moment belongs to exactly one phase: to the innermost that is under way, so the phases of a step and Sonde's own time add up to the
step. `torch.save` inside a validation is checkpointing, a batch that is fetched there is data, a backward inside of an optimizer's
closure is backward. Outside of all of them the time is validation from the first forward without gradients on, until the training
goes on; before and after that it is other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING

from sonde.capture.recorder import Journal
from sonde.capture.standins import Desk

OTHER, VALIDATION = "other_ms", "validation_ms"
_SCALARS = {phase: f"{phase}_ms" for phase in ("data", "transfer", "forward", "backward", "optimizer", "checkpoint")}
_UNKNOWN = dict.fromkeys((*_SCALARS.values(), OTHER, VALIDATION), math.nan)
_TRAINING = ("forward", "backward", "optimizer")  # one of these, and the validation is over


class Meter:
    """Which phases are under way, and whose the time since the last change is. The native one (_kernel_meter.h) does the same."""

    def __init__(self, desk: Desk, scalars: dict[str, float], names: dict[str, str]) -> None:
        self._desk, self._scalars, self._names = desk, scalars, names
        self.under_way = [OTHER]  # innermost last
        self.mark_ns = 0  # up to here the time is accounted for, on a clock that stands still while Sonde works
        self.entered_ns = 0  # when Sonde was last called: since then the time is its own
        self.step_began = 0
        self.validating = False
        self.on_change: Callable[[str, bool], None] | None = None  # who else wants to know: of the phase, and whether it begins

    def begin(self, phase: str) -> None:
        if self.on_change is not None:
            self.on_change(phase, True)
        self.account()
        if self.validating and phase in _TRAINING:
            self.validating, self.under_way[0] = False, OTHER
        self.under_way.append(self._names[phase])

    def finish(self, phase: str) -> None:
        """Ends when Sonde was called to hear of it. Our hooks inside the phase are not the phase's."""
        name = self._names[phase]
        if name in self.under_way:
            self.account()
            self.under_way.remove(name)  # another thread may have begun something meanwhile
            if self.on_change is not None:
                self.on_change(phase, False)

    def account(self) -> None:
        """What has passed since the last change belongs to the innermost phase."""
        now = self.entered_ns - self._desk.own_ns
        if self.step_began and now > self.mark_ns:
            self._scalars[self.under_way[-1]] += (now - self.mark_ns) / 1e6
        self.mark_ns = now


if not TYPE_CHECKING and os.environ.get("SONDE_NATIVE", "1") != "0":
    try:
        from sonde.capture._kernel import Meter
    except ImportError:  # built without a compiler
        pass


class Phases(Meter):
    def __init__(self, journal: Journal, desk: Desk) -> None:
        super().__init__(desk, journal.scalars, _SCALARS)
        self._journal, self._desk = journal, desk
        self.are_logged = True

    def validate(self) -> None:
        """A forward without gradients, before the step has trained anything."""
        if not self.validating:
            self.account()
            self.validating, self.under_way[0] = True, VALIDATION

    def touch(self) -> None:
        """The first step begins with the first call that belongs to a training, not when the script starts."""
        if not self.step_began:
            self.step_began = self.mark_ns = self.entered_ns
            self._desk.own_ns = 0  # what was Sonde's before is no part of the step

    def leave_out(self, ns: int) -> None:
        """That much time, just now, was nobody's: neither the training's nor part of what Sonde costs a step."""
        self.entered_ns += ns
        self.step_began += ns
        self.mark_ns += ns

    def begin_step(self) -> None:
        del self.under_way[1:]
        self.mark_ns = self.step_began = self.entered_ns = perf_counter_ns()
        self._desk.own_ns = 0

    def write(self) -> tuple[int, int]:
        """Writes the step's times; answers with its length and Sonde's part of it. What follows is counted to the next step: a frame
        cannot hold the time that its own writing takes."""
        self.account()
        now = perf_counter_ns()
        own_ns = self._desk.own_ns + now - self.entered_ns
        step_ns = now - self.step_began if self.step_began else 0
        del self.under_way[1:]
        self.mark_ns = self.step_began = self.entered_ns = now
        self._desk.own_ns = 0
        if not self.are_logged:
            self._journal.scalars.update(_UNKNOWN)
        self._journal.scalars["step_ms"] = step_ns / 1e6
        self._journal.scalars["sonde_ms"] = own_ns / 1e6
        return step_ns, own_ns
