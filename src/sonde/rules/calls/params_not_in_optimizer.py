"""A part of the model gets gradients, but no optimizer holds its parameters.

What it finds    an optimizer that was built with only some of the parameters that should train.
Why it matters   that part stays as it was initialized, and its gradients are never cleared: they only grow.
How it knows     trainable parameters are in no optimizer, get non-zero gradients again and again, and never change.
Known problems   frozen parts (requires_grad=False) get no gradients, and parts that another optimizer or the program itself changes (target
                 networks, averaged weights) have changed: neither is reported. A whole model that runs after the trained one (a fixed
                 critic) is an info if the training does not fail. Nothing is reported if the optimizer holds an image or a prompt (style
                 transfer). A replaced head is stale-optimizer-params.
Fix              pass all of model.parameters() to the optimizer, or set requires_grad_(False) on what must not train.
"""

from sonde.events import Finding, Severity
from sonde.formatting import listing
from sonde.rules._shared.module_names import modules_of
from sonde.rules._shared.unowned_parameters import OBSERVED, UnownedParameters, runs_after_trained_model, trainable_paths
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView


def check(view: RunView) -> Result:
    parameters = view.remember(UnownedParameters.of)
    if not parameters.untrained or parameters.num_abandoned or parameters.trains_other_tensors:
        return NotEvaluated(parameters.reason_not_evaluated) if parameters.reason_not_evaluated else Clear()
    models = dict.fromkeys(site.model for site in parameters.untrained)
    return [
        _finding(view, model, [site.path for site in parameters.untrained if site.model == model], parameters.first_step)
        for model in models
    ]


def _finding(view: RunView, model: str, untrained: list[str], step: int) -> Finding:
    trainable = trainable_paths(view, model)
    modules = modules_of(untrained, trainable)
    is_whole_model = len(untrained) >= len(trainable)
    severity = Severity.ERROR
    if is_whole_model and runs_after_trained_model(view, model):
        severity = Severity.WARNING if view.loss_trend.stuck else Severity.INFO
    where = ""
    if len(modules) == 1 or not is_whole_model:
        where = max(modules, key=lambda module: sum(path == module or path.startswith(module + ".") for path in untrained))
    return RULE.finding(
        severity,
        step,
        cause=f"{len(untrained)} of {len(trainable)} trainable parameters ({listing(modules)}) receive gradients, but no optimizer holds "
        f"them, and they never changed; the optimizer is built{view.call_sites.at('optimizer') or ' without them'}",
        fix="pass all of model.parameters() to the optimizer, or freeze what must not train with requires_grad_(False)",
        evidence={
            "num_unowned": len(untrained),
            "num_trainable": len(trainable),
            "modules": ", ".join(modules[:20]),
            **({"model": model} if model else {}),
            **view.call_sites.evidence("optimizer"),
        },
        where=where,
    )


RULE = Rule(
    "params-not-in-optimizer",
    check,
    page=__doc__,
    explains=(
        "loss-plateau", "unchanged-parameter", "exploding-gradient", "vanishing-gradient", "dead-relu", "nonfinite-loss",
    ),
    reductions=(OBSERVED,),
)  # fmt: skip
