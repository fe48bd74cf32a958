"""A schedule that is laid out in epochs is stepped with every batch.

What it finds    scheduler.step() inside of the loop over the batches, with a plan (StepLR(30), MultiStepLR([30, 60]),
                 ExponentialLR(0.95), CosineAnnealingLR(epochs), ReduceLROnPlateau) that counts epochs.
Why it matters   the learning rate is gone within the first epoch or two, and the rest of the run learns nothing; a cosine swings up and
                 down many times instead of once.
How it knows     the scheduler steps with every update, and: the rate fell to a thousandth of its peak and stays there for half of the
                 run, in the first two epochs or while the loss stands still; or all milestones of a plan that decays lie in the first
                 of many epochs; or T_max is the number of epochs.
Known problems   schedules that are meant to be stepped with every update (K34), that end near 0 (K33) or start again (K58) are silent:
                 their rate is small for a few updates only. Where an epoch is one update (the whole of the data as one batch), every
                 batch is every epoch (K72). A plan that does not shrink the rate by much does little harm, and is not found.
Fix              step it once per epoch, after the loop over the batches; or lay it out in updates: epochs times len(loader).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.learning import Learning
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.schedules import Rate, Schedule, Schedules
from sonde.rules.words import number

ENOUGH = 40  # updates: in fewer, a plan in epochs and one in updates look alike
TAIL = 0.5  # share of the run with a collapsed rate: a cosine has 0.02, a polynomial 0.03, milestones that are meant 0.2
EARLY = 2.0  # epochs in which the rate is gone: no plan for epochs ends there …
MANY = 4  # … of a run of so many
LEARNT = 0.2  # of the first loss: what has learnt that much before its rate was gone may have been meant so
SWINGS = 3.0  # half periods of a cosine: one is what it is for


@dataclass(slots=True)
class SchedulerTooOften:
    name: ClassVar[str] = "scheduler-too-often"
    explains: ClassVar[tuple[str, ...]] = ("lr-zero", "loss-plateau", "unchanged-parameter", "vanishing-gradient", "dead-relu")

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
        if not known.stepped:
            return Clear()
        if known.num_updates < ENOUGH:
            return NotEvaluated(f"only {known.num_updates} updates were made")
        if not known.with_every_update or 0 < known.epochs.length < EARLY:
            return Clear()
        rate = next((rate for rate in known.rates.values() if self._is_gone(rate)), None)
        if rate is not None:
            return [self._gone(rate)]
        for one in known.stepped:
            if self._is_passed(one):
                return [self._passed(one)]
            if self._swings(one):
                return [self._swung(one)]
        return Clear()

    # -- how it shows ------------------------------------------------------------------------------

    def _is_gone(self, rate: Rate) -> bool:
        if rate.tail_step < 0 or rate.tail_num < TAIL * rate.num:
            return False
        epochs = self.schedules.epochs
        if epochs.num >= MANY and rate.tail_step <= EARLY * epochs.length:
            return True
        if epochs.sure_length:
            return not rate.learns_in_tail
        by_loss = any(one.name == "ReduceLROnPlateau" for one in self.schedules.stepped)  # it may have waited for what it saw
        has_learnt = self.learning.readable and self.learning.recent_level < LEARNT * self.learning.first_level
        return not by_loss and not rate.learns_in_tail and not has_learnt

    def _is_passed(self, one: Schedule) -> bool:
        milestones, epochs = one.plan.get("milestones"), self.schedules.epochs
        if not isinstance(milestones, list) or one.parts or not milestones:
            return False
        decays = 0 < float(one.plan.get("gamma", 1.0)) < 1
        return decays and epochs.num >= MANY and max(milestones) <= epochs.length

    def _swings(self, one: Schedule) -> bool:
        t_max, epochs = float(one.plan.get("T_max") or 0), self.schedules.epochs
        if not 1 < t_max < epochs.length or self.schedules.steps_each < SWINGS * t_max:
            return False
        return t_max in (epochs.planned, epochs.num)

    # -- what is said ------------------------------------------------------------------------------

    def _gone(self, rate: Rate) -> Finding:
        epochs = self.schedules.epochs
        one = self.schedules.stepped[0]
        when = f"step {rate.tail_step}"
        if epochs.length:
            when += f" (epoch {int(rate.tail_step / epochs.length) + 1} of {max(epochs.num, epochs.planned)})"
        stuck = self.learning.stuck
        cause = (
            f"{one} is stepped with every update{self.schedules.at()}: the learning rate was {number(rate.peak)} and is below "
            f"a thousandth of that from {when} on, {number(rate.last)} at the end"
        )
        return self._finding(
            Severity.CRITICAL if stuck else Severity.ERROR, rate.tail_step, f"{cause}; {stuck}" if stuck else cause,
            peak_rate=rate.peak, last_rate=rate.last, collapsed_share=rate.tail_num / rate.num,
        )  # fmt: skip

    def _passed(self, one: Schedule) -> Finding:
        length = self.schedules.epochs.length
        return self._finding(
            Severity.ERROR, int(max(one.plan["milestones"])),
            f"{one} is stepped with every update{self.schedules.at()}: all its milestones are over in the first of "
            f"{self.schedules.epochs.num} epochs, which has {number(length)} updates",
            last_milestone=float(max(one.plan["milestones"])),
        )  # fmt: skip

    def _swung(self, one: Schedule) -> Finding:
        swings = self.schedules.steps_each / float(one.plan["T_max"])
        return self._finding(
            Severity.WARNING, one.begun,
            f"{one} is stepped with every update{self.schedules.at()}: T_max is the number of epochs, so the learning rate went up or down "
            f"{int(swings)} times instead of once",
            half_periods=swings,
        )  # fmt: skip

    def _finding(self, severity: Severity, step: int, cause: str, **evidence: float) -> Finding:
        known = self.schedules
        length = f" ({number(known.epochs.length)} updates)" if known.epochs.length else ""
        return Finding(
            rule=self.name,
            severity=severity,
            where="",
            step=step,
            cause=cause,
            fix=f"call scheduler.step() once per epoch{length}, after the loop over the batches, or lay the schedule out in updates: "
            "epochs * len(loader)",
            evidence={
                **known.evidence(), "scheduler_steps": known.num_steps, "updates": known.num_updates, **evidence,
                **({"updates_per_epoch": known.epochs.length} if known.epochs.length else {}),
            },
        )  # fmt: skip
