"""Where a step's time goes, by a monotonic clock; what Sonde itself takes is kept apart."""

from __future__ import annotations

from time import perf_counter_ns

from sonde.capture.journal import Journal
from sonde.capture.standins import Desk

_SCALARS = {phase: f"{phase}_ms" for phase in ("data", "forward", "backward", "optimizer")}


class Phases:
    def __init__(self, journal: Journal, desk: Desk) -> None:
        self._journal, self._desk = journal, desk
        self._began: dict[str, int] = {}  # phases under way: when they began, less what was Sonde's until then
        self.entered_ns = 0  # when Sonde was last called: since then the time is its own
        self._step_began = 0

    def begin(self, phase: str) -> None:
        self._began[phase] = self.entered_ns - self._desk.own_ns

    def finish(self, phase: str) -> None:
        """Ends when Sonde was called to hear of it. Our hooks inside the phase are not the phase's."""
        began = self._began.pop(phase, None)
        if began is not None:
            self._journal.scalars[_SCALARS[phase]] += max(0, self.entered_ns - self._desk.own_ns - began) / 1e6

    def touch(self) -> None:
        """The first step begins with the first call that belongs to a training, not when the script starts."""
        if not self._step_began:
            self._step_began = self.entered_ns

    def leave_out(self, ns: int) -> None:
        """That much time, just now, was nobody's: neither the training's nor part of what Sonde costs a step."""
        self.entered_ns += ns
        self._step_began += ns
        self._began = {phase: began + ns for phase, began in self._began.items()}

    def begin_step(self) -> None:
        self._began.clear()
        self._step_began = self.entered_ns = perf_counter_ns()
        self._desk.own_ns = 0

    def write(self) -> tuple[int, int]:
        """Writes the step's times; answers with its length and Sonde's part of it. What follows is counted to the next step: a frame
        cannot hold the time that its own writing takes."""
        now = perf_counter_ns()
        own_ns = self._desk.own_ns + now - self.entered_ns
        step_ns = now - self._step_began if self._step_began else 0
        self._began.clear()
        self._step_began = self.entered_ns = now
        self._desk.own_ns = 0
        scalars = self._journal.scalars
        known_ms = scalars["data_ms"] + scalars["forward_ms"] + scalars["backward_ms"] + scalars["optimizer_ms"]
        scalars["step_ms"] = step_ns / 1e6
        scalars["sonde_ms"] = own_ns / 1e6
        scalars["other_ms"] = max(0.0, (step_ns - own_ns) / 1e6 - known_ms)
        return step_ns, own_ns
