"""Validation takes a large share of the run.

What it finds    validations that are so frequent or so long that they take a large share of the run.
Why it matters   a curve with a tenth of the points shows the same; the time is better spent on training.
How it knows     from the first forward without gradients after a training step until the training goes on, without the time for data,
                 summed over the run and compared with everything else.
Known problems   a target network, a teacher or a sampled action is a forward without gradients in every step and belongs to the training:
                 if most steps have as few of them as training forwards, they do not count as validation. A validation that keeps gradients
                 on counts as training. One validation in a short run is no habit: two are needed.
Fix              validate less often, or on a fixed part of the data.
"""

from __future__ import annotations

from math import ceil

from sonde.formatting import number
from sonde.rules._shared.step_profiles import severity_of, with_gain
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView

DOMINATES = 0.4  # share of the time: a validation per epoch on a fifth of the data takes less than a tenth
FINE = 0.1  # share that nobody minds: the proposal aims at it
USUAL = 0.5  # share of steps: what happens in more of them is part of the step …
MANY = 4  # … unless so many forwards are made without gradients for each one with


def check(view: RunView) -> Result:
    times = view.times
    if reason := times.reason_not_evaluated:
        return NotEvaluated(reason)
    share = times.share("validation")
    rows = times.rows[view.steps["validation_ms"][times.rows] > 0]  # steps before which the training validated
    num = len(rows)
    forwards, eval_forwards = (int(view.counts(name)[rows].sum()) for name in ("forwards", "eval_forwards"))
    is_part_of_step = num > USUAL * times.num and eval_forwards < MANY * forwards
    if share < DOMINATES or num < 2 or is_part_of_step:
        return Clear()
    fewer = max(2, ceil(share / (FINE / (1 - FINE) * (1 - share))))
    gain = share * (1 - 1 / fewer)
    if not times.is_worth(gain):
        return Clear()
    every = times.num / num
    return RULE.finding(
        severity_of(gain),
        times.first_step,
        cause=f"{100 * share:.0f} % of the time is validation{view.call_sites.at('eval_forward')}: it comes every "
        f"{number(round(every, 1))} steps and takes {number(times.totals['validation'] / num)} ms, a training step "
        f"{number(times.usual_ms())} ms",
        fix=with_gain(f"validate {fewer} times less often (every {ceil(every * fewer)} steps), or on a part of the data", gain),
        evidence={
            "gain": gain,
            "validation_share": share,
            "num_validations": num,
            "steps_between": every,
            "times_less_often": fewer,
            **view.call_sites.evidence("eval_forward"),
        },
    )


RULE = Rule("validation-dominates", check, page=__doc__, explains=("slow-step-outliers",))
