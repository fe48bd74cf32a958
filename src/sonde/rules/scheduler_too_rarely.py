"""A schedule that is laid out in updates is stepped once per epoch.

What it finds    OneCycleLR(total_steps=epochs * len(loader)), a warm-up or a cosine over all updates, whose scheduler.step() stands
                 outside of the loop over the batches.
Why it matters   the learning rate hardly leaves its first value: a one-cycle plan starts at a twenty-fifth of its peak and stays there.
How it knows     the plan's total is the number of updates that the epochs of the loop are meant to have (or, where no loop is known, that
                 the finished run has), updates pass without a step of the scheduler, and it made a quarter of its steps or fewer. Or:
                 gradients are accumulated, the total is the number of batches, and it was stepped with every update.
Known problems   a plan that is stopped early has steps left, too: one in epochs has a total that is no number of updates (K75), and one
                 in updates keeps pace with them (K78). Plans without an end (StepLR, LambdaLR) cannot be judged like this.
Fix              step it after every optimizer.step(), inside of the loop over the batches; or give it the number of epochs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.learning import Learning
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.schedules import Schedule, Schedules
from sonde.rules.words import number

ENOUGH = 40  # updates and steps of the plan: below, epochs and updates are too alike
FEWEST = 2  # steps that were made: after one, nobody knows in which unit
LEFT = 4.0  # times as many steps in the plan as were made
ACCUMULATED = 1.8  # the same, where the plan counts batches and gradients are accumulated over two or more
ALIKE = 0.1  # the last batches of an epoch may be dropped: what is further off than that is another number of batches


@dataclass(slots=True)
class SchedulerTooRarely:
    name: ClassVar[str] = "scheduler-too-rarely"
    explains: ClassVar[tuple[str, ...]] = ("lr-stuck-in-warmup", "loss-plateau", "unchanged-parameter", "vanishing-gradient")

    schedules: Schedules = field(default_factory=Schedules)
    learning: Learning = field(default_factory=Learning)

    def see(self, step: Step) -> None:
        self.schedules.see(step)
        if self.schedules.made:
            self.learning.see(step)

    def answer(self) -> Answer:
        known = self.schedules
        if not known.num_updates:
            return NotEvaluated("no optimizer stepped")
        planned = [(one, total) for one in known.stepped if (total := known.total(one)) >= ENOUGH]
        if not planned:
            return Clear()
        if known.num_updates < ENOUGH or known.steps_each < FEWEST:
            return NotEvaluated(f"only {known.num_updates} updates and {known.num_steps} steps of a scheduler were made")
        for one, total in planned:
            if known.steps_each * LEFT <= total and not known.keep_pace and self._counts_updates(total):
                return [self._finding(one, total, "update")]
            if self._counts_batches(total):
                return [self._finding(one, total, "batch")]
        return Clear()

    def _counts_updates(self, total: float) -> bool:
        """Up to one update in each epoch: the last, smaller batch may be counted or not."""
        known = self.schedules
        if known.epochs.planned and abs(total - known.epochs.planned) <= 1:
            return False  # it counts the epochs of the loop
        if meant := known.epochs.planned * known.epochs.length:
            return abs(total - meant) <= known.epochs.planned + 1
        # A run that is stopped early makes any number of updates: only at its end, and only if it is that number, can it be meant.
        off = abs(total - known.num_updates)
        return known.has_finished and min(off, abs(off - known.steps_each)) <= 1

    def _counts_batches(self, total: float) -> bool:
        known = self.schedules
        accumulates = known.with_every_update and known.num_backwards >= ACCUMULATED * known.num_updates
        left = total >= ACCUMULATED * known.steps_each
        return accumulates and left and known.has_finished and abs(total - known.num_backwards) <= ALIKE * total

    def _finding(self, one: Schedule, total: float, unit: str) -> Finding:
        known = self.schedules
        rates = [rate for rate in known.rates.values() if rate.num]
        rate = max(rates, key=lambda each: each.num, default=None)
        went = f": the learning rate went from {number(rate.first)} to {number(rate.last)}" if rate else ""
        stuck = self.learning.stuck
        return Finding(
            rule=self.name,
            severity=Severity.CRITICAL if stuck else Severity.ERROR,
            where="",
            step=one.begun,
            cause=f"{one} has a plan of {number(total)} steps, which is one per {unit}, but was stepped {number(known.steps_each)} times "
            f"in {known.num_updates} updates{known.at()}{went}" + (f"; {stuck}" if stuck else ""),
            fix="call scheduler.step() after every optimizer.step(), inside of the loop over the batches, or give the schedule the number "
            "of epochs"
            if unit == "update"
            else "lay the schedule out in updates: divide its total by the number of batches whose gradients are accumulated",
            evidence={
                **known.evidence(), "total": total, "scheduler_steps": known.num_steps, "updates": known.num_updates,
                **({"first_rate": rate.first, "peak_rate": rate.peak, "last_rate": rate.last} if rate else {}),
            },
        )  # fmt: skip
