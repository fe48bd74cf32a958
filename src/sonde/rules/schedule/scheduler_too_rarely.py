"""A schedule that counts updates is stepped once per epoch.

What it finds    OneCycleLR(total_steps=epochs * len(loader)), a warm-up or a cosine over all updates, stepped outside of the loop over the
                 batches.
Why it matters   the learning rate hardly leaves its first value: a one-cycle schedule starts at a twenty-fifth of its peak and stays there.
How it knows     the total of the schedule is the number of updates in the planned epochs (or in the finished run), and it made a quarter of
                 its steps or fewer while updates passed without one. Or gradients are accumulated, the total counts batches, and the
                 scheduler steps with every update.
Known problems   a schedule in a run that stops early has steps left too: in epochs, its total is no number of updates; in updates, it steps
                 with every update. Schedules without an end (StepLR, LambdaLR) are not found.
Fix              step it after every optimizer.step(), inside of the loop over the batches; or pass the number of epochs to it.
"""

from sonde.events import Finding, Severity
from sonde.formatting import number
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView
from sonde.run_view.learning_rate_schedule import Scheduler

ENOUGH = 40  # updates and steps of the schedule: below, epochs and updates are too alike
FEWEST = 2  # steps that were made: one does not show the unit
LEFT = 4.0  # times as many steps in the schedule as were made
ACCUMULATED = 1.8  # the same, if the schedule counts batches and gradients are accumulated over two or more
ALIKE = 0.1  # the last batches of an epoch may be dropped: a larger difference is another number of batches


def check(view: RunView) -> Result:
    schedule = view.schedule
    if not schedule.num_updates:
        return NotEvaluated("no optimizer stepped")
    planned = [(scheduler, total) for scheduler in schedule.stepped if (total := schedule.total(scheduler)) >= ENOUGH]
    if not planned:
        return Clear()
    if schedule.num_updates < ENOUGH or schedule.steps_each < FEWEST:
        return NotEvaluated(f"only {schedule.num_updates} updates and {schedule.num_steps} steps of a scheduler were made")
    for scheduler, total in planned:
        if schedule.steps_each * LEFT <= total and not schedule.has_step_for_every_update and _counts_updates(view, total):
            return [_finding(view, scheduler, total, "update")]
        if _counts_batches(view, total):
            return [_finding(view, scheduler, total, "batch")]
    return Clear()


def _counts_updates(view: RunView, total: float) -> bool:
    """Up to one update in each epoch: the last, smaller batch may be counted or not."""
    num_planned = view.epochs.num_planned
    if num_planned and abs(total - num_planned) <= 1:
        return False  # it counts the epochs of the loop
    if expected := num_planned * view.epochs.length:
        return abs(total - expected) <= num_planned + 1
    # A run that is stopped early has any number of updates: only at the end of a run can its number of updates be the intended total.
    difference = abs(total - view.schedule.num_updates)
    return view.schedule.has_finished and min(difference, abs(difference - view.schedule.steps_each)) <= 1


def _counts_batches(view: RunView, total: float) -> bool:
    schedule, num_backwards = view.schedule, view.calls["backwards"]
    accumulates = schedule.is_stepped_with_every_update and num_backwards >= ACCUMULATED * schedule.num_updates
    has_steps_left = total >= ACCUMULATED * schedule.steps_each
    return accumulates and has_steps_left and schedule.has_finished and abs(total - num_backwards) <= ALIKE * total


def _finding(view: RunView, scheduler: Scheduler, total: float, unit: str) -> Finding:
    schedule, stuck = view.schedule, view.loss_trend.stuck
    rate = max(schedule.rates.values(), key=lambda each: each.num, default=None)
    change = f": the learning rate went from {number(rate.first)} to {number(rate.last)}" if rate else ""
    return RULE.finding(
        Severity.CRITICAL if stuck else Severity.ERROR,
        scheduler.first_step,
        cause=f"{scheduler} has a plan of {number(total)} steps, which is one per {unit}, but was stepped {number(schedule.steps_each)} "
        f"times in {schedule.num_updates} updates{schedule.at()}{change}" + (f"; {stuck}" if stuck else ""),
        fix="call scheduler.step() after every optimizer.step(), inside of the loop over the batches, or pass the number of epochs to the "
        "scheduler"
        if unit == "update"
        else "count updates in the arguments of the scheduler: divide its total by the number of batches whose gradients are accumulated",
        evidence={
            **schedule.evidence(), "total": total, "scheduler_steps": schedule.num_steps, "updates": schedule.num_updates,
            **({"first_rate": rate.first, "peak_rate": rate.peak, "last_rate": rate.last} if rate else {}),
        },
    )  # fmt: skip


RULE = Rule(
    "scheduler-too-rarely",
    check,
    page=__doc__,
    explains=("lr-stuck-in-warmup", "loss-plateau", "unchanged-parameter", "vanishing-gradient"),
)
