"""The input of the model is the same for all samples.

What it finds    inputs that are all zero, or one and the same row for every sample of every batch.
Why it matters   the model can only learn how often each target occurs; zeros do not even give the first layer a gradient.
How it knows     in all inspected steps, all samples of every input of the model were equal, bit for bit, in all calls of the step.
Known problems   one input that varies is enough: a mask or a start token may be constant beside it, and a rollout or a decoder may start
                 from the same state. Labels that the model receives for its loss do not count. Batches of one sample are not evaluated,
                 nor is a vector that is one sample (the model returns no row for each of its numbers).
Fix              print one batch right before model(...), and search for the line that multiplies, masks, casts or loads it wrongly.
"""

from math import isnan, nan

import numpy as np

from sonde.events import Kind, Severity
from sonde.formatting import number
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView

ENOUGH = 5  # inspected steps: a first batch of zeros is often used to test the model


def check(view: RunView) -> Result:
    batches = view.inspected_batches
    is_comparable = batches.num_inputs > 0
    num = int(np.count_nonzero(is_comparable))
    if not num:
        if len(batches.rows):
            return NotEvaluated("every batch had one sample")
        return NotEvaluated("no batch was inspected: no observed step ran a watched model")
    is_constant = is_comparable & (batches.num_alike >= batches.num_inputs)
    if np.count_nonzero(is_constant) < num or len(np.unique(batches.sample[is_constant])) > 1:
        return Clear()
    if num < ENOUGH:
        return NotEvaluated(f"only {num} batches were inspected")
    first = int(np.flatnonzero(is_constant)[0])
    row = int(batches.rows[first])
    value = _constant_value(view, row)
    content = "all samples were one and the same" if isnan(value) else f"every number was {number(value)}"
    return RULE.finding(
        Severity.CRITICAL,
        view.step_number(row),
        cause=f"the model received the same input for all samples of all {num} batches that were inspected: {content}"
        f"{view.call_sites.at('forward')}",
        fix="print x.float().std(dim=0) right before model(...), and go back to the line after which it is 0",
        evidence={
            "num_looked_at": num, "batch_size": int(batches.size[first]), **({} if isnan(value) else {"value": value}),
            **view.call_sites.evidence("forward"),
        },
    )  # fmt: skip


def _constant_value(view: RunView, row: int) -> float:
    """The value of all elements of the input, or of the batch if the input is one of its tensors; NaN if they differ."""
    for block in view.blocks(Kind.BATCH):
        at = np.flatnonzero(block.rows == row)
        if len(at) and Kind.BATCH in block:
            table = block[Kind.BATCH]
            known = [(site.path, column) for column, site in enumerate(table.sites) if site is not None]
            column = next((column for path, column in known if path.startswith("input.")), known[0][1] if known else None)
            if column is not None and table["min"][at[0], column] == table["max"][at[0], column]:
                return float(table["min"][at[0], column])
    return nan


RULE = Rule(
    "constant-input",
    check,
    page=__doc__,
    explains=(
        "same-batch", "loss-plateau", "dead-relu", "vanishing-gradient", "unchanged-parameter", "iterable-duplicated", "exploding-gradient",
    ),
)  # fmt: skip
