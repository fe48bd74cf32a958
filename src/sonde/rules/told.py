"""What is worth telling of how a training went, beside its findings: its learning rate, its GradScaler, who stopped it, its data.

Facts in sentences; nothing is judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, nan
from typing import Any

from sonde.events import Step
from sonde.rules.activity import count
from sonde.rules.feeding import Feeding
from sonde.rules.schedules import Rate, Schedules
from sonde.rules.words import listing, number

VALIDATION = re.compile(r"(?:^|[^a-z])(?:val|valid|validation|eval|dev|test)(?:[^a-z]|$)", re.IGNORECASE)
FEWEST = 3  # evaluations: the best of two says nothing
MAX_NAMES = 16
RISES = 0.9  # of its peak: a rate that begins below is warmed up


@dataclass(slots=True)
class Told:
    """A fold over the steps of one process."""

    schedules: Schedules = field(default_factory=lambda: Schedules(always=True))
    feeding: Feeding = field(default_factory=Feeding)
    stopping: Mapping[str, Any] = field(default_factory=dict)  # the last word of an early stopping of Sonde's
    framework: Mapping[str, Any] = field(default_factory=dict)  # how a framework says that its training ended
    num_scaled: int = 0
    num_skipped: int = 0
    scale_first: float = nan
    scale_last: float = nan
    scale_lowest: float = inf
    scale_highest: float = -inf
    overflowed: list[str] = field(default_factory=list)  # parameters whose gradients were the first that were not finite

    def see(self, step: Step) -> None:
        self.schedules.see(step)
        self.feeding.see(step)
        for event in step.events:
            if event.kind == "early_stopping":
                self.stopping = event.data
            elif event.kind == "training_end":
                self.framework = event.data
            elif event.kind == "overflow" and (where := str(event.data.get("where", ""))) and where not in self.overflowed:
                self.overflowed = [*self.overflowed, where][:MAX_NAMES]
        scale = step.scalar("loss_scale")
        if isfinite(scale):
            self.num_scaled += 1
            self.num_skipped += count(step, "skipped_steps") > 0
            self.scale_first = scale if self.num_scaled == 1 else self.scale_first
            self.scale_last = scale
            self.scale_lowest, self.scale_highest = min(self.scale_lowest, scale), max(self.scale_highest, scale)

    def sentences(self, logged: Mapping[str, Sequence[tuple[int, float]]]) -> Iterator[tuple[str, str]]:
        """A word and a sentence each. `logged`: the series that the user logged."""
        if rate := self._rate():
            yield "schedule", rate
        if scaler := self._scaler():
            yield "scaler", scaler
        validation = self._validation(logged)
        if validation:
            yield "validation", validation
        if stop := self._stop():
            yield "stopped", stop
        yield from self.feeding.sentences()

    # -- the learning rate -------------------------------------------------------------------------

    def _rate(self) -> str:
        known = self.schedules
        rate = max(known.rates.values(), key=lambda each: (each.num_changes > 0, each.num), default=None)
        if rate is None or not rate.num_changes:
            return ""
        who = listing([f"{one.name} at {one.source}" if one.source else one.name for one in known.stepped], 2) or "set by hand"
        pace = ""
        if known.stepped and known.num_steps:
            every = round(known.num_updates / (known.steps_each + 1))  # the last time is often after the last update
            pace = ", stepped with every update" if known.with_every_update else f", stepped about every {every} updates"
        return f"{self._went(rate)} ({who}{pace})"

    @staticmethod
    def _went(rate: Rate) -> str:
        warm = rate.first < RISES * rate.peak
        began = f"up from {number(rate.first)} to {number(rate.peak)} at step {rate.peak_step}" if warm else number(rate.peak)
        if rate.last == rate.peak:
            return began
        low = f", as low as {number(rate.lowest)} in between" if rate.lowest < 0.5 * rate.last and rate.lowest != rate.first else ""
        return f"{began}, {number(rate.last)} at the end{low}"

    # -- the scale of the loss ---------------------------------------------------------------------

    def _scaler(self) -> str:
        if not self.num_scaled:
            return ""
        skipped = f"{self.num_skipped} of {self.num_scaled} updates skipped"
        if self.scale_lowest == self.scale_highest:
            return f"scale {number(self.scale_last)} throughout, {skipped}"
        between = f" (between {number(self.scale_lowest)} and {number(self.scale_highest)})"
        inside = {self.scale_first, self.scale_last} >= {self.scale_lowest, self.scale_highest}
        went = f"scale {number(self.scale_first)} at first, {number(self.scale_last)} at the end{'' if inside else between}, {skipped}"
        return f"{went}; not finite first: {listing(self.overflowed)}" if self.overflowed else went

    # -- how it came to its end --------------------------------------------------------------------

    def _validation(self, logged: Mapping[str, Sequence[tuple[int, float]]]) -> str:
        for name, points in logged.items():
            finite = [(value, -step) for step, value in points if isfinite(value)]
            if "loss" not in name.lower() or not VALIDATION.search(name) or len(finite) < FEWEST:
                continue
            best, at = min(finite)
            since = sum(step > -at for step, _ in points)
            bad = len(points) - len(finite)
            nan_too = f"; {bad} of {len(points)} values are not finite" if bad else ""
            if not since:
                return f"{name} is best at its last evaluation ({number(best)} at step {-at}){nan_too}"
            times = f"{since} evaluation{'s' * (since != 1)}"
            return f"{name} was best at step {-at} ({number(best)}), {times} before the last ({number(points[-1][1])}){nan_too}"
        return ""

    def _stop(self) -> str:
        if self.stopping.get("stopped"):
            why = str(self.stopping.get("why", "")).removeprefix("stopped: ")
            return f"early, by session.early_stopping: {why}"
        if self.framework.get("stopped_early"):
            return "early, as the framework says"
        rounds = self.schedules.epochs.course
        if rounds is None or not self.schedules.has_finished or rounds.num >= rounds.planned:
            return ""
        by = f", which has a break at {listing(rounds.breaks, 2)}" if rounds.breaks else ""
        return f"in round {rounds.num} of {rounds.planned} of the loop at {rounds.loop}{by}"
