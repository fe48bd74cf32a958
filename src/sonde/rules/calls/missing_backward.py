"""The optimizer steps, but no gradient was ever computed.

What it finds    loss.backward() is never called.
Why it matters   optimizer.step() silently skips parameters without gradients: nothing is learned, without an error message.
How it knows     there were optimizer steps, every one of them found each gradient None or zero, and no backward ran in the whole run.
Known problems   gradients written by hand or by torch.autograd.grad count as gradients.
Fix              call loss.backward() before optimizer.step().
"""

from sonde.events import Severity
from sonde.rules.column_helpers import first_where
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView

ENOUGH = 5  # optimizer steps: some programs step once to initialize an optimizer's state


def check(view: RunView) -> Result:
    updates, empty = view.calls["optimizer_steps"], view.calls["empty_updates"]
    if not view.calls.num_optimizers and not updates:
        return NotEvaluated("no optimizer was seen")
    if view.calls["backwards"]:
        return Clear()
    if updates < ENOUGH:
        return NotEvaluated(f"only {updates} optimizer steps were taken")
    if empty < updates:
        return Clear()
    return RULE.finding(
        Severity.CRITICAL,
        view.step_number(first_where(view.counts("optimizer_steps") > 0) or 0),
        cause=f"all {updates} optimizer steps{view.call_sites.at('optimizer_step')} found no gradient at any parameter, and backward "
        "was never called",
        fix="call loss.backward() before optimizer.step()",
        evidence={"optimizer_steps": updates, "empty_updates": empty, "backwards": 0, **view.call_sites.evidence("optimizer_step")},
    )


RULE = Rule("missing-backward", check, page=__doc__, explains=("loss-plateau", "unchanged-parameter", "lr-zero", "train-in-eval-mode"))
