"""A model outputs NaN, or an Inf that cannot be meant, when it is evaluated.

What it finds    outputs of a model that are not finite in a forward without gradients, or in evaluation mode: a variance of one sample, a
                 division by an empty count, running statistics that were never filled, half precision that overflows.
Why it matters   the training loss stays finite. Averages over the evaluation, early stopping and all predictions are wrong.
How it knows     outputs in evaluation are checked, as often as 2 % of the evaluation's time allows. The forward of a bad output is replayed
                 with every operation checked, and with parts of the batch to find the samples that trigger it.
Known problems   -Inf in logits is meant; an Inf counts only after an overflow, a division by 0, or in a weight. Outputs that are bad in
                 training too without harm (padding) are not reported. If the training went bad before, this follows from it. Not every
                 forward of a fast model is checked, and none on a device.
Fix              see the finding: it depends on the operation and its inputs.
"""

from sonde.events import NonFinite, Severity
from sonde.formatting import number
from sonde.rules._shared.origin_search_results import EVALUATION, evaluation_origin
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView


def check(view: RunView) -> Result:
    search = evaluation_origin(view)
    if search.origin is not None:
        return [search.finding(RULE.name, Severity.ERROR)]
    bad = next((event for _, event in view.events_with_rows(NonFinite) if event.what == EVALUATION), None)
    if bad is None:
        has_evaluated = view.counts("eval_forwards").any() or view.counts("root_in_eval").any()
        return Clear() if has_evaluated else NotEvaluated("no step with a forward in evaluation was recorded")
    num_nan, num_inf, num_elements = (float(num or 0) for num in (bad.num_nan, bad.num_inf, bad.num_elements))
    what = " and ".join(f"{number(num)} {name}" for num, name in ((num_nan, "NaN"), (num_inf, "Inf")) if num) or "non-finite numbers"
    why = f"; where they were made could not be found: {search.reason_unknown}" if search.reason_unknown else ""
    return RULE.finding(
        Severity.ERROR,
        bad.step,
        cause=f"in evaluation, at step {bad.step}, the model returned {what} among {number(num_elements)} numbers{why}",
        fix="run that batch inside of sonde.find_origin(model), which names the operation that makes them",
        evidence={"num_nan": num_nan, "num_inf": num_inf, "num_elements": num_elements},
        where=bad.where,
    )


RULE = Rule("nonfinite-evaluation", check, page=__doc__)
