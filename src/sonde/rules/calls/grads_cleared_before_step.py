"""The gradients are cleared after backward wrote them and before the optimizer could use them.

What it finds    zero_grad() is called between backward() and step().
Why it matters   the optimizer finds nothing to do: no parameter changes, and there is no error message.
How it knows     an optimizer step found every gradient None or zero, although a backward had written others since the last step.
Known problems   a loss whose gradient is zero is not this. Experts and heads that are idle in a step are only some parameters of an
                 optimizer. A GAN clears the discriminator's gradients before the discriminator's own backward.
Fix              call zero_grad() before backward, not after it.
"""

from sonde.events import Severity
from sonde.rules.column_helpers import first_streak
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView

PATIENCE = 3  # steps in a row: a loop may drop one batch on purpose, e.g. after a bad loss


def check(view: RunView) -> Result:
    updates, cleared = view.calls["optimizer_steps"], view.calls["cleared_updates"]
    is_cleared = view.counts("cleared_updates") > 0
    streak = first_streak(is_cleared.astype(int), sum_at_least=PATIENCE, among=view.counts("optimizer_steps") > 0)
    if streak is None:
        return Clear() if updates >= PATIENCE else NotEvaluated(f"only {updates} optimizer steps were taken")
    return RULE.finding(
        Severity.CRITICAL,
        view.step_number(streak.start),
        cause=f"{cleared} of {updates} optimizer steps found no gradient, because they were cleared{view.call_sites.at('zero_grad')} "
        "after backward had written them",
        fix="move zero_grad() in front of backward(), so that the order is zero_grad, backward, step",
        evidence={
            "cleared_updates": cleared,
            "optimizer_steps": updates,
            "backwards": view.calls["backwards"],
            **view.call_sites.evidence("zero_grad"),
        },
    )


RULE = Rule(
    "grads-cleared-before-step",
    check,
    page=__doc__,
    explains=("loss-plateau", "unchanged-parameter", "vanishing-gradient", "dead-relu", "lr-zero"),
)
