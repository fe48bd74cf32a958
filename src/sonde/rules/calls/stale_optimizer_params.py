"""The optimizer holds parameters that the model no longer has; the model trains with others.

What it finds    a head replaced, or a model copied, wrapped or re-created, after the optimizer was built.
Why it matters   the optimizer updates tensors that nothing uses, and the new ones stay as they were initialized.
How it knows     an optimizer holds parameters that belong to no model of the run and never get a gradient, while parameters of the model
                 that no optimizer holds get gradients again and again and never change.
Known problems   a separate parameter in the optimizer (a temperature, a prompt) gets gradients and is not stale. Stale parameters are
                 harmless if some optimizer holds every parameter of the model. The step of a swap is known to within two observed steps.
Fix              build the optimizer after the model has its final form.
"""

from sonde.events import Severity
from sonde.formatting import listing
from sonde.rules._shared.module_names import modules_of
from sonde.rules._shared.unowned_parameters import OBSERVED, UnownedParameters, trainable_paths
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView


def check(view: RunView) -> Result:
    parameters = view.remember(UnownedParameters.of)
    if not parameters.untrained or not parameters.num_abandoned:
        return NotEvaluated(parameters.reason_not_evaluated) if parameters.reason_not_evaluated else Clear()
    model = parameters.untrained[0].model
    trainable = trainable_paths(view, model)
    untrained = [site.path for site in parameters.untrained if site.model == model]
    modules = modules_of(untrained, trainable)
    return RULE.finding(
        Severity.CRITICAL if len(untrained) >= len(trainable) else Severity.ERROR,
        parameters.first_step if parameters.replaced_after < 0 else parameters.replaced_after + 1,
        cause=f"the optimizer built{view.call_sites.at('optimizer')} holds {parameters.num_abandoned} parameters that are in no model "
        f"that ran, while {len(untrained)} of the model's {len(trainable)} trainable parameters ({listing(modules)}) get gradients "
        "and are in no optimizer" + _when_replaced(parameters),
        fix="build the optimizer after the last change to the model (new head, copy, wrapping), or add the new parameters to it",
        evidence={
            "num_abandoned": parameters.num_abandoned,
            "num_unowned": len(untrained),
            "num_trainable": len(trainable),
            "modules": ", ".join(modules[:20]),
            **({"last_step_of_old_parameters": parameters.replaced_after} if parameters.replaced_after >= 0 else {}),
            **view.call_sites.evidence("optimizer"),
        },
        where=modules[0] if len(modules) == 1 else "",
    )


def _when_replaced(parameters: UnownedParameters) -> str:
    if parameters.replaced_after < 0:
        return ""
    return f"; they replaced others after step {parameters.replaced_after}, and before or in step {parameters.replaced_before}"


RULE = Rule(
    "stale-optimizer-params",
    check,
    page=__doc__,
    explains=(
        "params-not-in-optimizer", "grads-cleared-before-step", "missing-backward", "loss-plateau", "unchanged-parameter",
        "exploding-gradient", "vanishing-gradient", "dead-relu", "nonfinite-loss", "loss-spike", "gradient-spike",
    ),
    reductions=(OBSERVED,),
)  # fmt: skip
