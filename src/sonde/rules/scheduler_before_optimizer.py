"""The scheduler steps before the optimizer does.

What it finds    scheduler.step() at the beginning of an epoch or of an iteration, as it was right before PyTorch 1.1.
Why it matters   the first value of the schedule is never used, and everything comes one epoch (or one update) too early.
How it knows     the scheduler's first step came before any optimizer had stepped, and the same line goes on to step it.
Known problems   under a GradScaler the optimizer is held back in the first steps, and torch itself warns of a wrong order: such steps
                 are counted here as what they are, and nothing is said (K70). A scheduler that is brought forward before a training
                 goes on (by another line, K73, or by state that was loaded) and one that is told its place (step(epoch + i / n), K74)
                 skip nothing. ReduceLROnPlateau has no first value. Where the first value is 0, to skip it may be meant: that is only
                 mentioned. Nor is anything said of a scheduler that counts batches where several of them make an update.
Fix              call scheduler.step() after optimizer.step(): at the end of the iteration or of the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.schedules import Schedule, Schedules
from sonde.rules.words import number

FEWEST = 2  # steps of the scheduler: one alone may be part of setting it up
BATCHES = 1.5  # steps per update: it counts the batches of which several make an update
NOTHING = 1e-3  # of the learning rate: a warm-up from here loses nothing with its first value


@dataclass(slots=True)
class SchedulerBeforeOptimizer:
    name: ClassVar[str] = "scheduler-before-optimizer"
    explains: ClassVar[tuple[str, ...]] = ()

    schedules: Schedules = field(default_factory=Schedules)

    def see(self, step: Step) -> None:
        self.schedules.see(step)

    def answer(self) -> Answer:
        known = self.schedules
        if not known.num_updates:
            return NotEvaluated("no optimizer stepped")
        early = [one for one in known.stepped if self._is_early(one)]
        if not early:
            return Clear()
        if known.num_steps < FEWEST * len(known.stepped):
            return NotEvaluated("a scheduler was stepped only once")
        return [self._finding(early[0])]

    def _is_early(self, one: Schedule) -> bool:
        if not one.before_optimizer or one.given or one.name == "ReduceLROnPlateau":
            return False
        known = self.schedules
        anew = one.last_epoch == 1  # else its state was loaded
        counts_batches = known.steps_each > BATCHES * known.num_updates
        return anew and not counts_batches and len(known.lines) <= len(known.stepped)

    def _finding(self, one: Schedule) -> Finding:
        known = self.schedules
        skipped = one.rates[0] if one.rates else float("nan")
        used = next((rate.first for rate in known.rates.values()), float("nan"))
        meant = max(one.initial, default=skipped)
        unit = "update" if known.with_every_update else "epoch"
        values = f" ({number(skipped)}; the first {unit} has {number(used)})" if skipped != used else ""
        return Finding(
            rule=self.name,
            severity=Severity.INFO if skipped <= NOTHING * meant else Severity.WARNING,
            where="",
            step=one.begun,
            cause=f"{one} was stepped{known.at()} before the optimizer had stepped: the first value of the schedule{values} is never used, "
            f"and what follows comes one {unit} too early",
            fix="call scheduler.step() after optimizer.step(), at the end of the iteration or of the epoch",
            evidence={**known.evidence(), "skipped_rate": skipped, "first_rate": used, "scheduler_steps": known.num_steps},
        )
