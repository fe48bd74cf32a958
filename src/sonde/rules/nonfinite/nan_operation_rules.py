"""Operations that make a NaN or Inf in a well-known way. The search for the origin finds the operation and names the defect by a key; here
each defect is a rule with its own page."""

from functools import partial

from sonde.events import Severity
from sonde.rules._shared.origin_search_results import CONSEQUENCES, OPERATION_DEFECTS, training_origin
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView

_PAGES = {
    "unstable-softmax": """A softmax or a log-sum-exp written by hand overflows.

What it finds    exp(), then a sum, then a division or a logarithm, on scores that are too large for exp().
Why it matters   exp(89) is Inf in float32 (exp(12) in float16), and Inf / Inf is NaN: the loss is NaN as soon as the scores grow.
How it knows     the replay of the step found that exp() made the first Inf, and that it is part of such a formula.
Known problems   scores that grow without bound because the training diverges end here too; then lr-divergence is named first.
Fix              torch.softmax, torch.log_softmax, torch.logsumexp or F.cross_entropy on the scores themselves.
""",
    "nan-grad-sqrt-zero": """A square root, or a norm, of zero: the loss is finite and its gradient is not.

What it finds    sqrt(), a power below one, or a norm whose argument is exactly zero for some sample.
Why it matters   the slope at zero is infinite, and times the zero slope of a square it is NaN. The loss of that step is normal; one
                 update later every weight is NaN.
How it knows     the backward was replayed, and the backward of this operation made the first NaN or Inf.
Known problems   none known: a root at zero that does not reach a gradient does not count.
Fix              add a small number inside the root: sqrt(x + 1e-12).
""",
    "nan-grad-where": """torch.where() hides a NaN in the forward, and the backward brings it back.

What it finds    where(x > 0, sqrt(x), 0) and the like: the branch that is not chosen is computed all the same.
Why it matters   its gradient is zero times infinity, which is NaN. The loss of that step is normal; one update later every weight is
                 NaN.
How it knows     the backward was replayed: the operation that made the first NaN got a gradient of zero from a where().
Known problems   none known.
Fix              make the argument safe before the operation: sqrt(where(x > 0, x, 1)), and choose afterwards.
""",
    "all-targets-ignored": """Every label of a batch is ignored, so the loss is a mean over nothing.

What it finds    cross_entropy or nll_loss whose every target is ignore_index (a batch of padding, a window without labels).
Why it matters   0 / 0 is NaN: averages and early stopping break, and with an update the weights may become NaN too.
How it knows     the replay of the step found the loss function that made the NaN and counted its targets.
Known problems   none known.
Fix              skip such batches, or use reduction="sum" and divide by the number of targets that count, at least one.
""",
    "fp16-overflow": """A number beyond 65504 in half precision.

What it finds    an operation in float16 whose result does not fit: a matrix product, a sum, an exponential, a cast.
Why it matters   it becomes Inf, and soon NaN. float16 ends at 65504, bfloat16 and float32 at 3e38.
How it knows     the replay of the step found the operation that made the first Inf, and its dtype.
Known problems   steps that a GradScaler skips, as it does while it searches for its scale, are not counted.
Fix              run that part in float32 (autocast(enabled=False)) or in bfloat16, or keep its inputs smaller.
""",
}


def check(view: RunView, *, rule: str) -> Result:
    search = view.remember(training_origin)
    if search.origin is None:
        return Clear() if view.calls["backwards"] else NotEvaluated("no backward was seen")
    return [search.finding(rule, Severity.CRITICAL)] if search.origin.key in OPERATION_DEFECTS[rule] else Clear()


RULES: tuple[Rule, ...] = tuple(Rule(name, partial(check, rule=name), page=page, explains=CONSEQUENCES) for name, page in _PAGES.items())
