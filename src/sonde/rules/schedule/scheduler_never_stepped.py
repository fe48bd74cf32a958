"""A scheduler is created and never stepped.

What it finds    scheduler = StepLR(optimizer, 30) without a scheduler.step() anywhere in the training loop.
Why it matters   the learning rate stays at its first value: the schedule has no effect.
How it knows     no scheduler of this optimizer was ever stepped, although epochs have passed or the run has ended.
Known problems   a run that ends within its first epoch may not have reached the call. If another scheduler of the optimizer is stepped,
                 this one may be for a later stage (SWALR). A class of your own with its own step() is not evaluated. A rate that stays at
                 the start of a warm-up is lr-stuck-in-warmup.
Fix              call scheduler.step() once per epoch or after every optimizer.step(), as the schedule counts; or remove the scheduler.
"""

from sonde.events import Severity
from sonde.formatting import number
from sonde.rules._shared.unstepped_schedulers import ENOUGH, NOT_COUNTED, NOT_OVERDUE, SMALL, is_overdue
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView
from sonde.run_view.learning_rate_schedule import Scheduler


def check(view: RunView) -> Result:
    schedule = view.schedule
    if not schedule.num_updates:
        return NotEvaluated("no optimizer stepped")
    scheduled = {scheduler.created.optimizer for scheduler in schedule.schedulers.values() if scheduler.first_step >= 0}
    unstepped = [each for each in schedule.active if each.first_step < 0 and each.created.optimizer not in scheduled]
    if not unstepped:
        return Clear()
    if not all(scheduler.created.is_step_counted for scheduler in unstepped):
        return NOT_COUNTED
    if schedule.num_updates < ENOUGH:
        return NotEvaluated(f"only {schedule.num_updates} updates were made")
    if any(rate.num_changes for rate in schedule.rates.values()):
        return NotEvaluated("the learning rate changes, although no step of a scheduler was recorded")
    if not is_overdue(view):
        return NOT_OVERDUE
    scheduler = next((each for each in unstepped if not _begins_with_warmup(each)), None)
    if scheduler is None:
        return Clear()
    rate = next((rate.last for rate in schedule.rates.values()), float("nan"))
    at = f" at {scheduler.created.source}" if scheduler.created.source else ""
    return RULE.finding(
        Severity.WARNING,
        0,
        cause=f"{scheduler} was created{at} and never stepped: the learning rate is {number(rate)} in all {schedule.num_updates} updates",
        fix="call scheduler.step() once per epoch, or after every optimizer.step(), whichever the schedule counts; or remove the scheduler",
        evidence={**scheduler.evidence(), "rate": rate, "updates": schedule.num_updates},
    )


def _begins_with_warmup(scheduler: Scheduler) -> bool:
    rates, initial = scheduler.created.rates, scheduler.created.initial
    return bool(rates and initial) and max(rates) <= SMALL * max(initial)


RULE = Rule("scheduler-never-stepped", check, page=__doc__)
