"""A batch with NaN or Inf enters the model, and the loss becomes non-finite.

What it finds    missing values or overflow in the data.
Why it matters   one bad cell makes the loss and every gradient NaN; after the next update every weight is NaN.
How it knows     the input of the model was not finite in the first step whose loss, output or gradients were not finite.
Known problems   an input counts only if something after it in the same step is not finite: masks of -Infinity, and NaN that the model
                 replaces, do no harm. Non-finite labels are nonfinite-loss. The output of one model that is the input of another is none.
Fix              find the rows (torch.isfinite(x).all(dim=1)) and drop or fill them before training.
"""

import numpy as np

from sonde.events import NonFinite, Severity
from sonde.formatting import number
from sonde.rules._shared.origin_search_results import NONFINITE_RULES
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView


def check(view: RunView) -> Result:
    inputs: dict[int, NonFinite] = {}  # by row
    harmed = np.flatnonzero(view.losses.is_nonfinite)[:1].tolist()
    for row, event in view.events_with_rows(NonFinite):
        if event.what == "input":
            inputs.setdefault(row, event)
        elif event.what in ("output", "gradient", "loss"):
            harmed.append(row)
    row = min(harmed, default=-1)
    if row not in inputs:
        return Clear() if view.calls["forwards"] else NotEvaluated("no forward of a watched model was recorded")
    bad, step = inputs[row], view.step_number(row)
    num_nan, num_inf, num_elements = bad.num_nan or 0.0, bad.num_inf or 0.0, bad.num_elements or 0.0
    content = " and ".join(f"{number(num)} {name}" for num, name in ((num_nan, "NaN"), (num_inf, "Inf")) if num) or "non-finite numbers"
    return RULE.finding(
        Severity.CRITICAL,
        step,
        cause=f"the input of step {step} had {content} among its {number(num_elements)} numbers, before anything else was non-finite"
        f"{view.call_sites.at('forward')}",
        fix="find the rows that are not finite (torch.isfinite) and drop or fill them before they reach the model",
        evidence={
            "num_nan": num_nan,
            "num_inf": num_inf,
            "num_elements": num_elements,
            "steps_with_bad_input": len(inputs),
            **view.call_sites.evidence("forward"),
        },
        where=bad.where,
    )


RULE = Rule(
    "nan-input",
    check,
    page=__doc__,
    explains=(
        *NONFINITE_RULES, "lr-divergence", "exploding-gradient", "vanishing-gradient", "dead-relu", "loss-plateau", "unchanged-parameter",
    ),
)  # fmt: skip
