"""The warm-up of the learning rate never ends.

What it finds    a scheduler that starts at a small part of the learning rate and is never stepped, or so rarely that it does not get
                 on.
Why it matters   all of the run trains with a rate that was meant for its first moments: next to nothing is learnt.
How it knows     the rate is at a tenth or less of what the optimizer was given, from the first update to the last, and: no scheduler
                 was ever stepped, although epochs have passed or the run has come to its end; or at the pace of its steps so far, the
                 warm-up would need a hundred of them and more, while many updates pass between two.
Known problems   a warm-up that is on its way, with every update, is silent however long it is (K05); so are runs that end within their
                 first epoch.
Fix              call scheduler.step() after every optimizer.step(), inside of the loop over the batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.learning import Learning
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.schedules import Rate, Schedules, made_evidence
from sonde.rules.words import number

ENOUGH = 40  # updates: warm-ups of ten or twenty are common
SMALL = 0.1  # of the rate that the optimizer was given: a warm-up begins there, a plan that only trims the rate does not
FEWEST = 3  # steps of a scheduler from which its pace can be told
LONG = 100.0  # steps that the warm-up would need: so many epochs of warm-up nobody wants
APART = 4.0  # updates between two steps of the scheduler: fewer are gradient accumulation


@dataclass(slots=True)
class LrStuckInWarmup:
    name: ClassVar[str] = "lr-stuck-in-warmup"
    explains: ClassVar[tuple[str, ...]] = ("loss-plateau", "unchanged-parameter", "vanishing-gradient", "dead-relu", "lr-zero")

    schedules: Schedules = field(default_factory=Schedules)
    learning: Learning = field(default_factory=Learning)
    given: float = 0.0  # rate of an optimizer that had a scheduler before anybody listened

    def see(self, step: Step) -> None:
        for event in step.events:
            if event.kind == "optimizer":
                initial = [group.get("initial_lr") for group in event.data.get("groups", ())]
                self.given = max([self.given, *(float(each) for each in initial if isinstance(each, (int, float)) and isfinite(each))])
                self.schedules.always = self.given > 0
        self.schedules.see(step)
        if self.schedules.made or self.given:
            self.learning.see(step)

    def answer(self) -> Answer:
        known = self.schedules
        if not known.num_updates:
            return NotEvaluated("no optimizer stepped")
        if not known.live and not self.given:
            return Clear()
        if known.num_updates < ENOUGH:
            return NotEvaluated(f"only {known.num_updates} updates were made")
        meant = max((each for one in known.live for each in one.initial if isfinite(each)), default=self.given)
        rate = max(known.rates.values(), key=lambda each: each.peak, default=None)
        if rate is None or not meant or not rate.peak <= SMALL * meant or rate.last < rate.first:
            return Clear()
        if known.stepped or known.num_steps:
            return [self._finding(rate, meant)] if self._crawls(rate, meant) else Clear()
        if any(not one.heard for one in known.made.values()):
            return NotEvaluated("a scheduler of your own steps by itself, which is not heard")
        if not is_overdue(known):
            return NotEvaluated("the first epoch is not over, and the scheduler may be stepped after it")
        return [self._finding(rate, meant)]

    def _crawls(self, rate: Rate, meant: float) -> bool:
        steps = self.schedules.steps_each
        if steps < FEWEST or steps * APART > self.schedules.num_updates or rate.last <= rate.first:
            return False
        return steps * (meant - rate.first) / (rate.last - rate.first) >= LONG

    def _finding(self, rate: Rate, meant: float) -> Finding:
        known = self.schedules
        one = next(iter(known.live), None)
        stuck = self.learning.stuck
        how = f"was stepped {number(known.steps_each)} times in {known.num_updates} updates" if known.num_steps else "was never stepped"
        went = f"stays at {number(rate.last)}" if rate.last == rate.first else f"went from {number(rate.first)} to {number(rate.last)}"
        where = known.evidence() or (made_evidence(one) if one else {})
        return Finding(
            rule=self.name,
            severity=Severity.CRITICAL if stuck else Severity.ERROR,
            where="",
            step=0,
            cause=f"{one or 'a scheduler'} begins with a warm-up and {how}: the learning rate {went}, and was to become {number(meant)}"
            + (f"; {stuck}" if stuck else ""),
            fix="call scheduler.step() after every optimizer.step(), inside of the loop over the batches",
            evidence={
                **where, "rate": rate.last, "meant_rate": meant, "scheduler_steps": known.num_steps, "updates": known.num_updates,
            },
        )  # fmt: skip


def is_overdue(known: Schedules) -> bool:
    """A scheduler that has not been stepped by now will not be: an epoch is over, or the program."""
    epochs = known.epochs
    if epochs.loaders or epochs.framework.num:
        over = epochs.is_beyond_first(known.num_backwards)
        return over and (known.has_finished or epochs.num >= FEWEST)
    return known.has_finished or epochs.evaluations.num > FEWEST
