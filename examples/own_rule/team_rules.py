"""The optimizer uses gradients that were not clipped.

What it finds    optimizer steps without clip_grad_norm_ or clip_grad_value_ before them.
Why it matters   our team clips the gradients of every training: one bad batch has undone days of work.
How it knows     steps of the run with an optimizer step and without a call that clips.
Known problems   an optimizer that clips by itself is reported too.
Fix              call torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before optimizer.step().
"""

from __future__ import annotations

from sonde.events import Severity
from sonde.rules.column_helpers import first_where
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView

ENOUGH = 10  # updates: a shorter run is a trial


def check(view: RunView) -> Result:
    is_update = view.counts("optimizer_steps") > 0
    is_unclipped = is_update & (view.counts("clips") == 0)
    num_updates, num_unclipped = int(is_update.sum()), int(is_unclipped.sum())
    if num_updates < ENOUGH:
        return NotEvaluated(f"only {num_updates} updates were made")
    first = first_where(is_unclipped)
    if first is None:
        return Clear()
    return RULE.finding(
        Severity.WARNING,
        view.step_number(first),
        cause=f"{num_unclipped} of {num_updates} updates{view.call_sites.at('optimizer_step')} used gradients that were not clipped",
        fix="call torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before optimizer.step()",
        evidence={"unclipped_updates": num_unclipped, "updates": num_updates, **view.call_sites.evidence("optimizer_step")},
    )


RULE = Rule("unclipped-gradients", check, page=__doc__, needs=("optimizer_steps", "clips"))
