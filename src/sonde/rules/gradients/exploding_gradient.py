"""The gradient grows by orders of magnitude on its way through the model, and the training fails by it.

What it finds    deep or recurrent models whose signal is multiplied at every layer or time step: a gain too large, recurrent weights too
                 large, no normalization, no clipping.
Why it matters   updates become far too large; the loss jumps, diverges or becomes NaN.
How it knows     outputs or gradients grow by orders of magnitude along the depth already before the first update, or the gradient norm
                 jumps to a hundred times its usual size again and again; and the training fails. Growth of both by a thousand is always
                 reported.
Known problems   large but even gradients come from a large loss: only growth along the depth counts. Clipped training, skipped steps and
                 trainings that learn are not reported. Large gradients after the first updates, or after the learning rate was raised, are
                 lr-divergence.
Fix              clip gradients (torch.nn.utils.clip_grad_norm_), scale the initialization to the fan-in, add normalization.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from sonde.events import Severity
from sonde.formatting import number
from sonde.rules._shared.clipping_advice import Clipping
from sonde.rules._shared.divergence_cause import DIVERGENCE_CAUSE
from sonde.rules._shared.origin_search_results import NONFINITE_RULES
from sonde.rules.column_helpers import largest_number
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView

LEAP = 100.0  # times the usual gradient norm: batches differ by factors of two to ten
USUAL = 20  # norms whose median is the usual one
NUM_LEAPS = 3  # a single outlier batch is not an explosion
RATE_ROSE = 2.0  # times the largest learning rate before: another optimizer, or a schedule that was set by hand


def check(view: RunView) -> Result:
    trend, cause, jumps = view.loss_trend, view.reduced(DIVERGENCE_CAUSE), NormJumps.of(view)
    if not jumps.num_norms and not trend.num_nonfinite:
        return NotEvaluated("no gradients were observed")
    clipping = view.remember(Clipping.of)
    growth, severity, outcome = cause.growth, Severity.CRITICAL, trend.failing
    if trend.failing and growth:
        step, where, sentence = growth.step, growth.where, growth.sentence
    elif trend.failing and jumps.num >= NUM_LEAPS and not cause.has_large_update and not _has_rate_risen(view, jumps.first_step):
        step, where = jumps.first_step, ""
        sentence = f"the gradient norm jumped to more than {LEAP:g} times its usual {number(jumps.usual)} in {jumps.num} steps"
    elif not trend.failing and growth and growth.is_both_ways:
        step, where, sentence = growth.step, growth.where, f"{growth.sentence}, outputs and gradients both grow with the depth"
        severity, outcome = Severity.WARNING, f"the loss began at {number(trend.first_level)} and is at {number(trend.recent_level)}"
    else:
        return Clear()
    return RULE.finding(
        severity,
        step,
        cause=f"{sentence}, and {outcome}{clipping.without_effect}",
        fix=f"{clipping.advice}; scale the initialization to the fan-in, or add normalization",
        evidence={
            "largest_grad_norm": jumps.largest,
            "num_leaps": jumps.num,
            "clips": clipping.state,
            **cause.evidence(),
            **view.call_sites.evidence("backward"),
        },
        where=where,
    )


def _has_rate_risen(view: RunView, step: int) -> bool:
    """Whether the learning rate was raised shortly before a step: then larger updates made the gradient jump (lr-divergence)."""
    rates, row = view.steps["lr"], int(np.searchsorted(view.step_numbers, step))
    before, now = rates[: max(0, row - USUAL)], rates[max(0, row - USUAL) : row + 1]
    return largest_number(now) > RATE_ROSE * largest_number(before) > 0


@dataclass(frozen=True, slots=True)
class NormJumps:
    """Gradient norms far above the median of those before them."""

    num_norms: int
    largest: float
    num: int = 0
    first_step: int = -1
    usual: float = nan  # at the first jump

    @classmethod
    def of(cls, view: RunView) -> NormJumps:
        column = view.steps["grad_norm"]
        rows = np.flatnonzero(np.isfinite(column) & (column > 0) & (view.counts("skipped_steps") == 0))
        norms = column[rows]
        largest = float(norms.max(initial=0.0))
        if len(norms) <= USUAL:
            return cls(len(norms), largest)
        before = sliding_window_view(norms, USUAL)[:-1]
        possible = np.flatnonzero(norms[USUAL:] > LEAP * before.min(axis=1))  # medians take time, and most steps need none
        medians = np.median(before[possible], axis=1)
        is_jump = norms[USUAL:][possible] > LEAP * medians
        if not is_jump.any():
            return cls(len(norms), largest)
        first = int(np.argmax(is_jump))
        step = view.step_number(int(rows[USUAL + possible[first]]))
        return cls(len(norms), largest, int(np.count_nonzero(is_jump)), step, float(medians[first]))


RULE = Rule(
    "exploding-gradient",
    check,
    page=__doc__,
    explains=(
        "lr-divergence", *NONFINITE_RULES, "dead-relu", "loss-plateau", "vanishing-gradient", "unchanged-parameter", "loss-spike",
        "gradient-spike",
    ),
    reductions=(DIVERGENCE_CAUSE,),
)  # fmt: skip
