"""The training stops while checkpoints are written.

What it finds    torch.save that takes a large share of the run.
Why it matters   a checkpoint that is written more often than work could be lost costs more than it saves.
How it knows     the time inside torch.save, summed over the run and compared with everything else.
Known problems   other ways to save (safetensors, a database, another thread) are not measured. A single save is no problem: two are needed.
Fix              save less often, or only what changed (a state_dict instead of the whole model, without the optimizer).
"""

from math import ceil

import numpy as np

from sonde.rules._shared.profiled_steps import too_often
from sonde.rules.rule import NotEvaluated, Result, Rule
from sonde.run_view import RunView

FINE = 0.02  # share of the time that is acceptable: the proposal aims at it


def check(view: RunView) -> Result:
    times = view.times
    if reason := times.reason_not_evaluated:
        return NotEvaluated(reason)
    num = int(np.count_nonzero(view.steps["checkpoint_ms"][times.rows] > 0))  # steps before which something was saved
    fewer = max(2, ceil(times.share("checkpoint") / FINE))
    return too_often(RULE, view, "checkpoint", num, fewer, what="torch.save", verb="save", part="less at a time", call="checkpoint")


RULE = Rule("checkpoint-stall", check, page=__doc__, explains=("slow-step-outliers",))
