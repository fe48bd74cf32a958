"""The warm-up of the learning rate never ends.

What it finds    a scheduler that starts at a small part of the learning rate and is never stepped, or so rarely that the rate hardly rises.
Why it matters   the whole run trains with a rate that is meant for its first steps: it learns next to nothing.
How it knows     the rate stays at a tenth or less of the initial rate from the first update to the last, and no scheduler was stepped
                 although epochs have passed or the run has ended, or the warm-up would need a hundred more scheduler steps, each many
                 updates apart.
Known problems   a warm-up that advances with every update is not reported, nor are runs that end within their first epoch.
Fix              call scheduler.step() after every optimizer.step(), inside of the loop over the batches.
"""

from math import isfinite

from sonde.events import Finding, OptimizerCreated, Severity
from sonde.formatting import number
from sonde.rules._shared.unstepped_schedulers import ENOUGH, NOT_COUNTED, NOT_OVERDUE, SMALL, is_overdue
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView
from sonde.run_view.learning_rate_schedule import LearningRate

FEWEST = 3  # steps of a scheduler that show its pace
LONG = 100.0  # steps that the warm-up would need: nobody wants so many epochs of warm-up
APART = 4.0  # updates between two steps of the scheduler: fewer are gradient accumulation


def check(view: RunView) -> Result:
    schedule = view.schedule
    if not schedule.num_updates:
        return NotEvaluated("no optimizer stepped")
    initial = _initial_rate_of_optimizers(view)
    if not schedule.active and not initial:
        return Clear()
    if schedule.num_updates < ENOUGH:
        return NotEvaluated(f"only {schedule.num_updates} updates were made")
    target = max((rate for scheduler in schedule.active for rate in scheduler.created.initial if isfinite(rate)), default=initial)
    rate = max(schedule.rates.values(), key=lambda each: each.peak, default=None)
    if rate is None or not target or rate.peak > SMALL * target or rate.last < rate.first:
        return Clear()
    if schedule.stepped or schedule.num_steps:
        return [_finding(view, rate, target)] if _hardly_rises(view, rate, target) else Clear()
    if not all(scheduler.created.is_step_counted for scheduler in schedule.schedulers.values()):
        return NOT_COUNTED
    return [_finding(view, rate, target)] if is_overdue(view) else NOT_OVERDUE


def _initial_rate_of_optimizers(view: RunView) -> float:
    """The largest initial rate of optimizers that had a scheduler before the run was recorded; 0 if there is none."""
    initial = [group.get("initial_lr") for optimizer in view.events(OptimizerCreated) for group in optimizer.groups]
    return max((float(each) for each in initial if isinstance(each, (int, float)) and isfinite(each)), default=0.0)


def _hardly_rises(view: RunView, rate: LearningRate, target: float) -> bool:
    steps = view.schedule.steps_each
    if steps < FEWEST or steps * APART > view.schedule.num_updates or rate.last <= rate.first:
        return False
    return steps * (target - rate.first) / (rate.last - rate.first) >= LONG


def _finding(view: RunView, rate: LearningRate, target: float) -> Finding:
    schedule, stuck = view.schedule, view.loss_trend.stuck
    scheduler = next(iter(schedule.active), None)
    steps = f"was stepped {number(schedule.steps_each)} times in {schedule.num_updates} updates"
    change = f"stays at {number(rate.last)}" if rate.last == rate.first else f"went from {number(rate.first)} to {number(rate.last)}"
    return RULE.finding(
        Severity.CRITICAL if stuck else Severity.ERROR,
        0,
        cause=f"{scheduler or 'a scheduler'} begins with a warm-up and {steps if schedule.num_steps else 'was never stepped'}: the "
        f"learning rate {change}, and was to become {number(target)}" + (f"; {stuck}" if stuck else ""),
        fix="call scheduler.step() after every optimizer.step(), inside of the loop over the batches",
        evidence={
            **(schedule.evidence() or (scheduler.evidence() if scheduler else {})),
            "rate": rate.last, "meant_rate": target, "scheduler_steps": schedule.num_steps, "updates": schedule.num_updates,
        },
    )  # fmt: skip


RULE = Rule(
    "lr-stuck-in-warmup",
    check,
    page=__doc__,
    explains=("loss-plateau", "unchanged-parameter", "vanishing-gradient", "dead-relu", "lr-zero"),
)
