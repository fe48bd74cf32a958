"""A scheduler was made and never stepped.

What it finds    scheduler = StepLR(optimizer, 30) without a scheduler.step() anywhere on the way.
Why it matters   the learning rate stays where it was: the plan that somebody wrote down is not followed.
How it knows     torch's own step of the scheduler, and of every other one of the same optimizer, was never called, although epochs have
                 passed or the run has come to its end.
Known problems   a run that ends within its first epoch may only not have come to it (K76). Where another scheduler of the same
                 optimizer is stepped, one of them may be for later (SWALR, K71). A scheduler of your own class that steps by itself is
                 not heard, and not judged. A rate that stays at the beginning of a warm-up is lr-stuck-in-warmup.
Fix              call scheduler.step() once per epoch, or after every optimizer.step(), as the schedule is laid out; or take the
                 scheduler out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.lr_stuck_in_warmup import SMALL, is_overdue
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.schedules import Schedule, Schedules, made_evidence
from sonde.rules.words import number

ENOUGH = 40  # updates: a shorter run is a trial


@dataclass(slots=True)
class SchedulerNeverStepped:
    name: ClassVar[str] = "scheduler-never-stepped"
    explains: ClassVar[tuple[str, ...]] = ()

    schedules: Schedules = field(default_factory=Schedules)

    def see(self, step: Step) -> None:
        self.schedules.see(step)

    def answer(self) -> Answer:
        known = self.schedules
        if not known.num_updates:
            return NotEvaluated("no optimizer stepped")
        driven = {one.optimizer for one in known.made.values() if one.begun >= 0}
        idle = [one for one in known.live if one.begun < 0 and one.optimizer not in driven]
        if not idle:
            return Clear()
        if not all(one.heard for one in idle):
            return NotEvaluated("a scheduler of your own steps by itself, which is not heard")
        if known.num_updates < ENOUGH:
            return NotEvaluated(f"only {known.num_updates} updates were made")
        if any(rate.num_changes for rate in known.rates.values()):
            return NotEvaluated("the learning rate changes, though no scheduler was heard")
        if not is_overdue(known):
            return NotEvaluated("the first epoch is not over, and the scheduler may be stepped after it")
        wanted = [one for one in idle if not _begins_low(one)]
        return [self._finding(wanted[0])] if wanted else Clear()

    def _finding(self, one: Schedule) -> Finding:
        known = self.schedules
        rate = next((rate.last for rate in known.rates.values()), float("nan"))
        at = f" at {one.source}" if one.source else ""
        return Finding(
            rule=self.name,
            severity=Severity.WARNING,
            where="",
            step=0,
            cause=f"{one} was made{at} and never stepped: the learning rate is {number(rate)} in all {known.num_updates} updates",
            fix="call scheduler.step() once per epoch, or after every optimizer.step(), as the schedule is laid out; or take it out",
            evidence={**made_evidence(one), "rate": rate, "updates": known.num_updates},
        )


def _begins_low(one: Schedule) -> bool:
    return bool(one.rates and one.initial) and max(one.rates) <= SMALL * max(one.initial)
