"""The updates are too large: the loss leaves its starting level and does not come back.

What it finds    a learning rate far too high for this model and optimizer.
Why it matters   each step overshoots further than the last: the loss explodes or becomes NaN, or the weights can learn nothing more.
How it knows     inputs and first gradients were in order, then updates were as large as the weights, or loss and gradient climbed together;
                 and the loss ends far above its start, not finite, or never below it.
Known problems   high rates that learn are not reported, nor are losses of adversaries and the error of a growing value estimate (DQN). A
                 NaN without the climb is nonfinite-loss, and growth before the first update exploding-gradient. A forgotten zero_grad and
                 bad inputs are named as the cause.
Fix              divide the learning rate by ten until the loss falls; add warm-up or clipping if only the start is rough.
"""

from math import isfinite

import numpy as np

from sonde.events import OptimizerCreated, Severity
from sonde.formatting import number
from sonde.rules._shared.clipping_advice import Clipping
from sonde.rules._shared.divergence_cause import DIVERGENCE_CAUSE
from sonde.rules._shared.origin_search_results import NONFINITE_RULES
from sonde.rules.column_helpers import Bools, first_number, largest_number
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView
from sonde.run_view.source_lines_of_calls import source_evidence

CLIMB = 10.0  # times the starting loss, on the way to a loss that is not finite: noise stays below
FAR = 1000.0  # times the starting loss, if it stays finite: errors of growing value estimates stay below
NUM_CLIMBED = 2  # losses that high before the end
DESTRUCTIVE = 1.0  # update over weights that by itself explains a loss that never falls


def check(view: RunView) -> Result:
    trend, cause = view.loss_trend, view.reduced(DIVERGENCE_CAUSE)
    if not view.calls["optimizer_steps"]:
        return NotEvaluated("no optimizer stepped")
    if not trend.num_losses:
        return NotEvaluated("no backward was seen")
    if not trend.failing or cause.growth:
        return Clear()
    is_lost = trend.is_gone or trend.has_risen
    is_far = trend.is_gone or trend.recent_level > FAR * trend.first_level
    is_high = _is_high(view)
    has_climbed = is_lost and is_far and np.count_nonzero(is_high) >= NUM_CLIMBED
    is_thrown = cause.has_large_update and (is_lost or cause.largest_ratio >= DESTRUCTIVE)
    if not has_climbed and not is_thrown:
        return Clear()
    steps = [view.step_number(int(np.argmax(is_high)))] if has_climbed else []
    steps += [cause.large_update_step] if is_thrown else []
    norms = view.steps["grad_norm"][np.isfinite(view.steps["grad_norm"])]
    first_norm, largest_norm = first_number(norms), largest_number(norms)
    weights = "the measured weights" if view.are_layers_chosen else "all weights"
    how = (
        f"an update was {number(cause.largest_ratio)} times the size of {weights}"
        if is_thrown
        else f"the loss climbed above {CLIMB:g} times its start, the gradient norm from {number(first_norm)} to {number(largest_norm)}"
    )
    rate, optimizer = _rate_and_optimizer(view, min(steps))
    at = f" at {optimizer.source}" if optimizer and optimizer.source else ""
    clipping = view.remember(Clipping.of)
    lower = f"lower the learning rate (try {number(rate / 10)} and below), or warm it up"
    if not isfinite(rate):
        lower = "lower the learning rate by a factor of ten until the loss falls"
    return RULE.finding(
        Severity.CRITICAL,
        min(steps),
        cause=f"with a learning rate of {number(rate)}{at} {how}, and {trend.failing}{clipping.without_effect}",
        fix=f"{clipping.advice}; then {lower}" if clipping.is_after_update else lower,
        evidence={
            "lr": rate,
            "first_loss": trend.first_level,
            "worst_loss": trend.worst,
            "first_grad_norm": first_norm,
            "largest_grad_norm": largest_norm,
            **cause.evidence(),
            **(source_evidence(optimizer.source, optimizer.text) if optimizer else {}),
        },
    )


def _is_high(view: RunView) -> Bools:
    """Steps with a finite loss above CLIMB times the first one."""
    first, loss = view.loss_trend.first, view.steps["loss"]
    if not first or min(first) <= 0:
        return np.zeros(view.num_steps, bool)
    is_high: Bools = np.isfinite(loss) & (loss > CLIMB * first[0]) & (view.step_numbers > view.loss_trend.first_step)
    return is_high


def _rate_and_optimizer(view: RunView, step: int) -> tuple[float, OptimizerCreated | None]:
    """The largest learning rate up to a step, and the optimizer that was created last before it."""
    rates, row = view.steps["lr"], int(np.searchsorted(view.step_numbers, step))
    created = view.events_with_rows(OptimizerCreated)
    last = max((at for at, _ in created if at <= row), default=None)
    optimizer = next((event for at, event in created if at == last), None)
    return largest_number(rates[: row + 1]), optimizer


RULE = Rule(
    "lr-divergence",
    check,
    page=__doc__,
    explains=(
        *NONFINITE_RULES, "dead-relu", "loss-plateau", "vanishing-gradient", "exploding-gradient", "unchanged-parameter", "loss-spike",
        "gradient-spike",
    ),
    reductions=(DIVERGENCE_CAUSE,),
)  # fmt: skip
