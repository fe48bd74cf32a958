"""The training leaves weights behind that are NaN or Inf, although every loss was finite.

What it finds    trainable parameters with NaN or Inf at the end of the run: made by the last update, or by code after it that averages,
                 prunes or scales weights.
Why it matters   the model that is saved returns NaN for every input.
How it knows     all parameters of the watched models are checked when the run ends, or when the program frees a model before.
                 No loss shows it, because no step follows.
Known problems   if a loss was not finite before, its own rule has found the cause, and this one is silent. Inf that were there at the
                 first observed step (a mask, a forbidden class) are meant.
Fix              check what is done to the weights after the last step; stop before an update with a gradient that is not finite.
"""

from sonde.events import Kind, NonFinite, Severity
from sonde.formatting import number
from sonde.rules.rule import Clear, Result, Rule
from sonde.run_view import RunView

PARAMETER = "parameter"


def check(view: RunView) -> Result:
    events = view.events(NonFinite)
    found = [event for event in events if event.what == PARAMETER]
    if not found or view.loss_trend.num_nonfinite:
        return Clear()
    num_inf_at_start = _num_inf_at_start(view)
    bad = next((event for event in found if event.num_nan or (event.num_inf or 0) > num_inf_at_start.get(event.where, 0)), None)
    if bad is None:
        return Clear()
    num_nan, num_inf, num_elements = (float(num or 0) for num in (bad.num_nan, bad.num_inf, bad.num_elements))
    is_freed_before_the_end = bad.step < view.last_step
    when = f"when the program freed the model, after step {number(bad.step)}," if is_freed_before_the_end else "at the end of the run"
    step = min(bad.step, view.last_step)
    gradient = next((event for event in events if event.what == "gradient" and event.step >= step), None)
    made_by = (
        f"the gradient of {gradient.where or 'a parameter'} was not finite in the last step"
        if gradient
        else "the last update made them, or code after it"
    )
    return RULE.finding(
        Severity.CRITICAL,
        step,
        cause=f"{when} {number(num_nan + num_inf)} of {number(num_elements)} numbers of {bad.where} are NaN or Inf although "
        f"every loss was finite: {made_by}",
        fix="check what is done to the weights after the last step, and skip an update whose gradient is not finite",
        evidence={"num_nan": num_nan, "num_inf": num_inf, "num_elements": num_elements},
        where=bad.where,
    )


def _num_inf_at_start(view: RunView) -> dict[str, float]:
    """By name, how many numbers of each parameter were infinite at the first observed step."""
    for block in view.blocks(Kind.PARAMETER, rows=view.observed_rows(Kind.PARAMETER)[:1]):
        table = block[Kind.PARAMETER]
        return {site.name: num for site, num in zip(table.sites, table["inf"][0].tolist()) if site is not None}
    return {}


RULE = Rule("nonfinite-parameter", check, page=__doc__, needs=("optimizer_steps",))
