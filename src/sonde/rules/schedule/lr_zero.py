"""The learning rate is exactly zero.

What it finds    an optimizer, or one of its parameter groups, that steps with a learning rate of 0.
Why it matters   no parameter changes, however long the training runs.
How it knows     the learning rate of the optimizer is 0 at every step, or at half of the steps or more without a break.
Known problems   a warm-up may start and a schedule may end at 0, for a few steps. If other parameter groups have a rate, one group may be
                 frozen on purpose: a warning. Optimizers without a learning rate are not evaluated.
Fix              set a learning rate above 0; if a scheduler sets it, print scheduler.get_last_lr().
"""

from __future__ import annotations

from dataclasses import dataclass

from sonde.events import OptimizerCreated, Severity
from sonde.rules.column_helpers import Array, streaks
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView

PATIENCE = 5  # steps at least: the first or the last value of a schedule may be 0
MOST = 0.5  # share of the run without a break: a schedule that ends at 0 reaches it late
MAX_GROUPS = 100  # groups that are followed; per-layer rates may make thousands


@dataclass(frozen=True, slots=True)
class GroupRate:
    """The learning rate of one parameter group at the optimizer steps."""

    num_steps: int
    num_zero: int
    longest: int  # steps in a row with a rate of 0
    longest_start: int  # number of the first of them

    @classmethod
    def from_columns(cls, numbers: Array, rates: Array) -> GroupRate:
        is_zero = rates == 0
        longest = max(streaks(is_zero), key=lambda streak: streak.length, default=None)
        start = int(numbers[longest.start]) if longest else -1
        return cls(len(rates), int(is_zero.sum()), longest.length if longest else 0, start)

    @property
    def is_zero(self) -> bool:
        return self.longest >= PATIENCE and self.longest >= MOST * self.num_steps


def check(view: RunView) -> Result:
    groups = _groups(view)
    if not groups:
        return NotEvaluated("no optimizer stepped with a learning rate")
    num_steps = max(group.num_steps for group in groups.values())
    if num_steps < PATIENCE:
        return NotEvaluated(f"only {num_steps} optimizer steps were taken")
    zero = {name: group for name, group in groups.items() if group.is_zero}
    if not zero:
        return Clear()
    are_all_zero = len(zero) == len(groups)
    name, group = next(iter(zero.items()))
    subject = "the learning rate" if are_all_zero else f"the learning rate of parameter group {name.partition(':')[2] or '1'}"
    num_scheduler_steps = view.calls["scheduler_steps"]
    call = "scheduler_step" if num_scheduler_steps and _is_created_with_rate(view) else "optimizer"
    return RULE.finding(
        Severity.CRITICAL if are_all_zero else Severity.WARNING,
        group.longest_start,
        cause=f"{subject} is exactly 0 in {group.num_zero} of {group.num_steps} optimizer steps{view.call_sites.at(call)}",
        fix="set a learning rate above 0; if a scheduler sets it, print scheduler.get_last_lr() and search for a factor that is 0",
        evidence={
            "num_zero": group.num_zero,
            "num_steps": group.num_steps,
            "groups": ", ".join(zero),
            "scheduler_steps": num_scheduler_steps,
            **view.call_sites.evidence(call),
        },
    )


def _groups(view: RunView) -> dict[str, GroupRate]:
    """By name of the scalar: `lr`, `lr:2` …"""
    has_stepped = view.counts("optimizer_steps") > 0
    groups: dict[str, GroupRate] = {}
    for name in view.steps:
        if (name == "lr" or name.startswith("lr:")) and len(groups) < MAX_GROUPS:
            rates = view.steps[name]
            is_known = has_stepped & (rates == rates)
            if is_known.any():
                groups[name] = GroupRate.from_columns(view.step_numbers[is_known], rates[is_known])
    return groups


def _is_created_with_rate(view: RunView) -> bool:
    return any(group.get("lr") for optimizer in view.events(OptimizerCreated) for group in optimizer.groups)


RULE = Rule("lr-zero", check, page=__doc__, explains=("loss-plateau", "unchanged-parameter", "vanishing-gradient", "dead-relu"))
