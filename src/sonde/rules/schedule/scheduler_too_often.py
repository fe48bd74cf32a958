"""A schedule that counts epochs is stepped with every batch.

What it finds    scheduler.step() inside of the loop over the batches, with a schedule that counts epochs: StepLR(30), MultiStepLR([30,
                 60]), ExponentialLR(0.95), CosineAnnealingLR(epochs), ReduceLROnPlateau.
Why it matters   the learning rate is close to 0 after an epoch or two, and the rest of the run learns nothing; a cosine goes up again.
How it knows     the scheduler steps with every update, and: the rate falls to a thousandth of its peak and stays there for half of the run,
                 in the first two epochs or while the loss does not fall; or all milestones lie in the first of many epochs; or T_max counts
                 epochs.
Known problems   schedules for every update that end near 0 or restart are not reported. If an epoch is one update, every batch is an epoch.
                 A schedule that reduces the rate only a little is not found.
Fix              step it once per epoch, after the loop over the batches; or count updates in its arguments: epochs * len(loader).
"""

from sonde.events import Finding, Severity
from sonde.formatting import number
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView
from sonde.run_view.learning_rate_schedule import LearningRate, Scheduler

ENOUGH = 40  # updates: in fewer, a schedule in epochs and one in updates look alike
TAIL = 0.5  # share of the run with a collapsed rate: a cosine has 0.02, a polynomial 0.03, intended milestones 0.2
EARLY = 2.0  # epochs in which the rate collapses: no schedule for epochs ends there …
MANY = 4  # … in a run of so many
LEARNED = 0.2  # of the first loss: if so much was learned before the rate collapsed, the schedule may be intended
SWINGS = 3.0  # half periods of a cosine: one is its purpose


def check(view: RunView) -> Result:
    schedule = view.schedule
    if not schedule.num_updates:
        return NotEvaluated("no optimizer stepped")
    if not schedule.stepped:
        return Clear()
    if schedule.num_updates < ENOUGH:
        return NotEvaluated(f"only {schedule.num_updates} updates were made")
    if not schedule.is_stepped_with_every_update or 0 < view.epochs.length < EARLY:
        return Clear()
    for rate in schedule.rates.values():
        if _has_collapsed(view, rate):
            return [_collapsed_rate(view, rate)]
    for scheduler in schedule.stepped:
        if _are_milestones_in_first_epoch(view, scheduler):
            return [_early_milestones(view, scheduler)]
        if _swings(view, scheduler):
            return [_swinging_cosine(view, scheduler)]
    return Clear()


def _has_collapsed(view: RunView, rate: LearningRate) -> bool:
    if rate.tail_step < 0 or rate.tail_num < TAIL * rate.num:
        return False
    if view.epochs.num >= MANY and rate.tail_step <= EARLY * view.epochs.length:
        return True
    if view.epochs.sure_length:
        return not rate.learns_in_tail
    trend = view.loss_trend
    follows_loss = any(one.name == "ReduceLROnPlateau" for one in view.schedule.stepped)  # it may have waited for a plateau
    has_learned = trend.is_readable and trend.recent_level < LEARNED * trend.first_level
    return not follows_loss and not rate.learns_in_tail and not has_learned


def _are_milestones_in_first_epoch(view: RunView, scheduler: Scheduler) -> bool:
    milestones = scheduler.created.plan.get("milestones")
    if not isinstance(milestones, list) or scheduler.created.parts or not milestones:
        return False
    is_decay = 0 < float(scheduler.created.plan.get("gamma", 1.0)) < 1
    return is_decay and view.epochs.num >= MANY and max(milestones) <= view.epochs.length


def _swings(view: RunView, scheduler: Scheduler) -> bool:
    half_period = float(scheduler.created.plan.get("T_max") or 0)
    if not 1 < half_period < view.epochs.length or view.schedule.steps_each < SWINGS * half_period:
        return False
    return half_period in (view.epochs.num_planned, view.epochs.num)


def _collapsed_rate(view: RunView, rate: LearningRate) -> Finding:
    epochs, stuck = view.epochs, view.loss_trend.stuck
    when = f"step {rate.tail_step}"
    if epochs.length:
        when += f" (epoch {int(rate.tail_step / epochs.length) + 1} of {max(epochs.num, epochs.num_planned)})"
    cause = f"the learning rate was {number(rate.peak)} and is below a thousandth of that from {when} on, {number(rate.last)} at the end"
    return _finding(
        view, view.schedule.stepped[0], Severity.CRITICAL if stuck else Severity.ERROR, rate.tail_step,
        f"{cause}; {stuck}" if stuck else cause,
        peak_rate=rate.peak, last_rate=rate.last, collapsed_share=rate.tail_num / rate.num,
    )  # fmt: skip


def _early_milestones(view: RunView, scheduler: Scheduler) -> Finding:
    last = max(scheduler.created.plan["milestones"])
    cause = f"all its milestones are in the first of {view.epochs.num} epochs, which has {number(view.epochs.length)} updates"
    return _finding(view, scheduler, Severity.ERROR, int(last), cause, last_milestone=float(last))


def _swinging_cosine(view: RunView, scheduler: Scheduler) -> Finding:
    swings = view.schedule.steps_each / float(scheduler.created.plan["T_max"])
    cause = f"T_max is the number of epochs, so the learning rate went up or down {int(swings)} times instead of once"
    return _finding(view, scheduler, Severity.WARNING, scheduler.first_step, cause, half_periods=swings)


def _finding(view: RunView, scheduler: Scheduler, severity: Severity, step: int, effect: str, **evidence: float) -> Finding:
    schedule, length = view.schedule, view.epochs.length
    updates = f" ({number(length)} updates)" if length else ""
    return RULE.finding(
        severity,
        step,
        cause=f"{scheduler} is stepped with every update{schedule.at()}: {effect}",
        fix=f"call scheduler.step() once per epoch{updates}, after the loop over the batches, or count updates in the arguments of the "
        "scheduler: epochs * len(loader)",
        evidence={
            **schedule.evidence(), "scheduler_steps": schedule.num_steps, "updates": schedule.num_updates, **evidence,
            **({"updates_per_epoch": length} if length else {}),
        },
    )  # fmt: skip


RULE = Rule(
    "scheduler-too-often",
    check,
    page=__doc__,
    explains=("lr-zero", "loss-plateau", "unchanged-parameter", "vanishing-gradient", "dead-relu"),
)
