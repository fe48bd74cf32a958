"""The training stops while checkpoints are written.

What it finds    torch.save that takes a large share of the run.
Why it matters   a checkpoint protects against losing work; one that is written more often than work could be lost costs more than it saves.
How it knows     the time inside torch.save, summed over the run and compared with everything else.
Known problems   what is saved by other means (safetensors, a database, another thread) is not measured. A single save at the end is no
                 problem: two are needed.
Fix              save less often, or only what changed (a state_dict instead of the whole model, without the optimizer).
"""

from __future__ import annotations

from math import ceil

import numpy as np

from sonde.formatting import number
from sonde.rules._shared.step_profiles import severity_of, with_gain
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView

FINE = 0.02  # share of the time that nobody minds: the proposal aims at it


def check(view: RunView) -> Result:
    times = view.times
    if reason := times.reason_not_evaluated:
        return NotEvaluated(reason)
    share = times.share("checkpoint")
    num = int(np.count_nonzero(view.steps["checkpoint_ms"][times.rows] > 0))  # steps before which something was saved
    fewer = max(2, ceil(share / FINE))
    gain = share * (1 - 1 / fewer)
    if num < 2 or not times.is_worth(gain):
        return Clear()
    every = times.num / num
    return RULE.finding(
        severity_of(gain),
        times.first_step,
        cause=f"{100 * share:.0f} % of the time is torch.save{view.call_sites.at('checkpoint')}: it comes every "
        f"{number(round(every, 1))} steps and takes {number(times.totals['checkpoint'] / num)} ms, a training step "
        f"{number(times.usual_ms())} ms",
        fix=with_gain(f"save {fewer} times less often (every {ceil(every * fewer)} steps), or less at a time", gain),
        evidence={
            "gain": gain,
            "checkpoint_share": share,
            "num_checkpoints": num,
            "steps_between": every,
            "times_less_often": fewer,
            **view.call_sites.evidence("checkpoint"),
        },
    )


RULE = Rule("checkpoint-stall", check, page=__doc__, explains=("slow-step-outliers",))
