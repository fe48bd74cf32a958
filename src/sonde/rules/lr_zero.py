"""The learning rate is exactly zero.

What it finds    an optimizer, or one of its parameter groups, that steps with a learning rate of 0.
Why it matters   nothing changes however long it trains.
How it knows     the learning rate read from the optimizer is 0 at every step, or at most steps of the run without a
                 break.
Known problems   warm-up may start at 0 (K05) and a schedule may end at 0 (K33): both are few steps of a run. Some
                 people hold a group still with a rate of 0 on purpose: one group alone is a warning. Optimizers that
                 keep no learning rate are not judged.
Fix              set a positive learning rate; print scheduler.get_last_lr() if a schedule makes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.activity import count
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.source import Sources

PATIENCE = 5  # steps at least: a schedule's first or last value may be 0
MOST = 0.5  # share of the run in one row: a schedule that ends at 0 gets there late
MAX_GROUPS = 100  # groups that are followed; per-layer rates may make thousands


@dataclass(slots=True)
class Group:
    num_steps: int = 0
    num_zero: int = 0
    in_a_row: int = 0
    row_step: int = -1
    longest: int = 0
    longest_step: int = -1

    def see(self, number: int, lr: float) -> None:
        self.num_steps += 1
        if lr != 0:
            self.in_a_row = 0
            return
        self.num_zero += 1
        self.in_a_row += 1
        if self.in_a_row == 1:
            self.row_step = number
        if self.in_a_row > self.longest:
            self.longest, self.longest_step = self.in_a_row, self.row_step

    @property
    def is_zero(self) -> bool:
        return self.longest >= PATIENCE and self.longest >= MOST * self.num_steps


@dataclass(slots=True)
class LrZero:
    name: ClassVar[str] = "lr-zero"
    explains: ClassVar[tuple[str, ...]] = ("loss-plateau", "unchanged-parameter", "vanishing-gradient", "dead-relu")

    sources: Sources = field(default_factory=Sources)
    groups: dict[str, Group] = field(default_factory=dict)
    num_schedules: int = 0
    built_with_zero: bool = True  # as far as is known

    def see(self, step: Step) -> None:
        self.sources.see(step)
        self.num_schedules += count(step, "scheduler_steps")
        for event in step.events:
            if event.kind == "optimizer" and any(group.get("lr") for group in event.data.get("groups", ())):
                self.built_with_zero = False
        if not count(step, "optimizer_steps"):
            return
        for name, value in step.scalars.items():
            if (name == "lr" or name.startswith("lr:")) and value == value:
                group = self.groups.get(name)
                if group is None and len(self.groups) < MAX_GROUPS:
                    group = self.groups[name] = Group()
                if group is not None:
                    group.see(step.number, value)

    def answer(self) -> Answer:
        if not self.groups:
            return NotEvaluated("no optimizer stepped with a learning rate")
        longest = max(group.num_steps for group in self.groups.values())
        if longest < PATIENCE:
            return NotEvaluated(f"only {longest} optimizer steps were taken")
        zero = {name: group for name, group in self.groups.items() if group.is_zero}
        if not zero:
            return Clear()
        every = len(zero) == len(self.groups)
        name, group = next(iter(zero.items()))
        position = name.partition(":")[2] or "1"
        who = "the learning rate" if every else f"the learning rate of parameter group {position}"
        call = "scheduler_step" if self.num_schedules and not self.built_with_zero else "optimizer"
        return [
            Finding(
                rule=self.name,
                severity=Severity.CRITICAL if every else Severity.WARNING,
                where="",
                step=group.longest_step,
                cause=f"{who} is exactly 0 in {group.num_zero} of {group.num_steps} optimizer steps{self.sources.at(call)}",
                fix="set a learning rate above 0; where a schedule makes it, print scheduler.get_last_lr() and look for a factor that is 0",
                evidence={
                    "num_zero": group.num_zero,
                    "num_steps": group.num_steps,
                    "groups": ", ".join(zero),
                    "scheduler_steps": self.num_schedules,
                    **self.sources.evidence(call),
                },
            )
        ]
