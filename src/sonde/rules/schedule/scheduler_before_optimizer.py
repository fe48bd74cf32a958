"""The scheduler steps before the optimizer does.

What it finds    scheduler.step() at the beginning of an epoch or of an iteration, as it was correct before PyTorch 1.1.
Why it matters   the first value of the schedule is never used, and every later value comes one epoch (or one update) too early.
How it knows     the first step of the scheduler came before any optimizer had stepped, and the same line makes its later steps.
Known problems   steps that a GradScaler skips count as steps. A scheduler that another line or a loaded state advances, and one that is
                 passed its position (step(epoch + i / n)), skip nothing. ReduceLROnPlateau has no first value. A first value of 0 may be
                 skipped on purpose: an info. A scheduler that counts batches under accumulation is not reported.
Fix              call scheduler.step() after optimizer.step(): at the end of the iteration or of the epoch.
"""

from sonde.events import Severity
from sonde.formatting import number
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView
from sonde.run_view.learning_rate_schedule import Scheduler

FEWEST = 2  # steps of the scheduler: a single one may be part of the setup
BATCHES = 1.5  # steps per update: it counts batches, of which several make an update
NOTHING = 1e-3  # of the learning rate: a warm-up from here loses nothing with its first value


def check(view: RunView) -> Result:
    schedule = view.schedule
    if not schedule.num_updates:
        return NotEvaluated("no optimizer stepped")
    scheduler = next((each for each in schedule.stepped if _skips_first_value(view, each)), None)
    if scheduler is None:
        return Clear()
    if schedule.num_steps < FEWEST * len(schedule.stepped):
        return NotEvaluated("a scheduler was stepped only once")
    skipped = scheduler.created.rates[0] if scheduler.created.rates else float("nan")
    first = next((rate.first for rate in schedule.rates.values()), float("nan"))
    initial = max(scheduler.created.initial, default=skipped)
    unit = "update" if schedule.is_stepped_with_every_update else "epoch"
    values = f" ({number(skipped)}; the first {unit} has {number(first)})" if skipped != first else ""
    return RULE.finding(
        Severity.INFO if skipped <= NOTHING * initial else Severity.WARNING,
        scheduler.first_step,
        cause=f"{scheduler} was stepped{schedule.at()} before the optimizer had stepped: the first value of the schedule{values} is "
        f"never used, and every later value comes one {unit} too early",
        fix="call scheduler.step() after optimizer.step(), at the end of the iteration or of the epoch",
        evidence={**schedule.evidence(), "skipped_rate": skipped, "first_rate": first, "scheduler_steps": schedule.num_steps},
    )


def _skips_first_value(view: RunView, scheduler: Scheduler) -> bool:
    schedule, start = view.schedule, scheduler.started
    if start is None or not start.is_before_optimizer or start.has_argument or scheduler.name == "ReduceLROnPlateau":
        return False
    is_new = start.last_epoch == 1  # else its state was loaded
    counts_batches = schedule.steps_each > BATCHES * schedule.num_updates
    return is_new and not counts_batches and len(schedule.lines) <= len(schedule.stepped)


RULE = Rule("scheduler-before-optimizer", check, page=__doc__)
