"""The end of a step: what was heard and measured in it is written, and the next one begins."""

from __future__ import annotations

from collections.abc import Callable

from sonde.capture.error_isolation import Faults
from sonde.capture.finite_check import Guard
from sonde.capture.gradient_state import Ledger
from sonde.capture.loss_values import Losses
from sonde.capture.model_registry import Models
from sonde.capture.overhead_budget import OverheadBudget
from sonde.capture.panel import Panel
from sonde.capture.phase_timer import Phases
from sonde.capture.probes.base import EXPONENTS_EVERY, EXPONENTS_FIRST, is_now_and_then
from sonde.capture.recorder import Journal
from sonde.capture.replay_buffer import ReplayBuffer
from sonde.capture.standins import Desk
from sonde.capture.step_boundaries import StepBoundaries
from sonde.capture.step_profiler.step_profiler import StepProfiler
from sonde.config import Measured
from sonde.statistics.deferred_reads import Far


class StepEnds:
    """What the loop does between two steps. On ordinary ones, and on observed ones where nothing is due, the native kernel takes its place
    (_kernel_end.h) and calls `write_observed` and `begin_after_observed`."""

    # Of the loop that it is a part of:
    deaf: bool
    observing: bool
    clock: StepBoundaries
    faults: Faults
    kept: ReplayBuffer
    ledger: Ledger
    xray: StepProfiler
    _desk: Desk
    _far: Far
    _governor: OverheadBudget
    _guard: Guard
    _is_quick: bool
    _journal: Journal
    _leave_doors: Callable[[], None]
    _losses: Losses
    _measured: Measured
    _models: Models
    _panel: Panel
    _phases: Phases

    def __init__(self) -> None:
        self._num_observed = 0
        self._is_written = False  # what the probes have measured in the step under way
        self.on_step_end: Callable[[int, bool], None] | None = None
        self.searches = False  # a step in which all is as it should be is told there too
        self.between_steps: Callable[[int, int], None] = lambda step, training_ns: None  # the step's scalars are still there
        self.quiet_until_ns = 0  # on our clock: before, there is nothing to do between two steps

    def _end_step(self) -> None:
        journal, step = self._journal, self.clock.number
        self.xray.step_ends(step)
        self._leave_doors()
        if step & (step - 1) == 0:  # 0, 1, 2, 4, 8 …: models and optimizers change rarely
            if self._models.tell_membership(self.ledger, step):
                self._governor.look_closely()
            self._models.refresh()
        self._losses.write(step)
        self._guard.write()
        if is_now_and_then(step):
            self._panel.each("now_and_then", step)
        if self.observing:
            if not self._is_written:
                self.write_observed()
        elif self._far.waiting and self._far.is_overdue():
            self._far.fetch()
        step_ns, own_ns = self._phases.write()
        self.between_steps(step, step_ns - own_ns)
        unseen = journal.scalars["backwards"] > 0 and journal.scalars["forwards"] == 0
        journal.end_step(step, waits=bool(self._far.waiting))
        self._governor.step_ended(step_ns=step_ns, own_ns=own_ns, observed=self.observing)
        self.clock.end()
        self._losses.clear()
        self._guard.clear()
        self.kept.clear()
        for watched in self._models:
            watched.doors_used.clear()
        self._choose()
        self.xray.step_begins(step + 1, step_ns - own_ns, self.observing and self._governor.every != 1)
        if self.on_step_end is not None:
            self.on_step_end(step, unseen)
        self._settle_desk()

    def write_observed(self) -> None:
        """The probes write what they have measured."""
        self._journal.scalars["observed"] = 1.0
        waiting = self._panel.pending()
        if waiting or self._far.waiting:
            self._far.fetch(waiting)
        self._panel.each("write", self.clock.number)
        self._num_observed += 1
        self._is_written = True

    def begin_after_observed(self, step_ns: float, own_ns: float) -> None:
        """An observed step has ended, and the native kernel has begun the next."""
        self._governor.step_ended(step_ns=step_ns, own_ns=own_ns, observed=True)
        self._choose()
        self._settle_desk()

    def _choose(self) -> None:
        """Will the step that begins be observed?"""
        if self.observing:
            self._panel.each("clear")
            self._is_written = False
        self.observing = self._measured.statistics and self._governor.observes(self.clock.number)
        if self.observing:
            num = self._num_observed
            in_full = self._measured.in_full or num in EXPONENTS_FIRST or num % EXPONENTS_EVERY == 0
            self._panel.each("begin", self.clock.number, with_exponents=in_full)

    def _settle_desk(self) -> None:
        desk = self._desk
        desk.steady = self._is_quick and self._phases.are_logged and not (self.xray.active or self._far.waiting or self.faults.retired)
        desk.plain = desk.steady and not self.observing
