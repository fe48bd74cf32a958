"""The loss has not moved from the level of blind guessing since the beginning.

What it finds    a training that demonstrably learns nothing, if no other rule knows why.
Why it matters   every further step is wasted.
How it knows     over many updates the loss never fell beyond its noise, and it is ln K (guessing among the K classes of the output), or the
                 same number to the last bit although parameters are updated, or most parameters never got a non-zero gradient.
Known problems   a flat loss away from ln K (fine-tuning, resuming at convergence, a noise floor, label smoothing) is not reported. With
                 several losses (adversaries, policies) or one that is not positive the rule is not evaluated. A loss of 0 may be a solved
                 task.
Fix              check that labels belong to inputs and that the output depends on the input; then try a larger learning rate.
"""

from dataclasses import dataclass, field
from math import log, nan
from statistics import median

import numpy as np

from sonde.events import Kind, Severity
from sonde.formatting import number
from sonde.rules._shared.divergence_cause import update_ratios
from sonde.rules._shared.module_names import modules_of
from sonde.rules._shared.unowned_parameters import is_unowned
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import Block, Reduction, RunView

ENOUGH = 50  # updates: warm-up and a hard start take tens
CONSTANT = 20  # losses in a row with the same bits: no two different batches cost exactly the same
EARLY = 5  # losses: a constant that begins later was reached, not there from the start
OBSERVED = 3  # steps with observed gradients: zero-initialized branches have zero gradients in the first alone
MOST = 0.5  # share of the parameters that no gradient ever reached: idle experts and heads are fewer, and such models learn
TINY = 1e-5  # update per weight and step: healthy is 1e-4 to 1e-2


@dataclass(slots=True)
class ObservedParameters:
    """The size of the first updates, and which parameters ever got a gradient other than zero."""

    ratios: list[float] = field(default_factory=list)  # update per weight, of the first observed steps
    num_gradients: int = 0  # observed steps with gradients
    is_reached: dict[int, bool] = field(default_factory=dict)  # by site
    changed: set[int] = field(default_factory=set)  # sites of parameters that an update or the program changed


def _reduce(block: Block, state: ObservedParameters) -> ObservedParameters:
    if len(state.ratios) < ENOUGH:
        ratios = update_ratios(block)
        state.ratios = [*state.ratios, *ratios[~np.isnan(ratios)].tolist()][:ENOUGH]
    gradient, update = block.get(Kind.GRADIENT), block.get(Kind.UPDATE)
    if update is not None:
        state.changed.update(update.site_ids[(update["l2"] > 0).any(axis=0)].tolist())
    if gradient is not None:
        state.num_gradients += len(block)
        is_reached = np.asarray(((gradient["l2"] > 0) | (gradient["nan"] > 0) | (gradient["inf"] > 0)).any(axis=0))
        for site, reached in zip(gradient.site_ids.tolist(), is_reached.tolist()):
            state.is_reached[site] = reached or state.is_reached.get(site, False)
    return state


OBSERVED_PARAMETERS = Reduction(kinds=(Kind.GRADIENT, Kind.UPDATE, Kind.PARAMETER), initial=ObservedParameters, reduce=_reduce)


def check(view: RunView) -> Result:
    trend, updates = view.loss_trend, view.calls.updates
    if trend.num_losses < ENOUGH or updates < ENOUGH:
        return NotEvaluated(f"fewer than {ENOUGH} updates with a loss were seen")
    if trend.has_several:
        return NotEvaluated("several losses are trained in turn, and none of them need fall")
    if not trend.is_readable:
        return NotEvaluated("the loss is not positive, so that its level says nothing")
    if trend.is_gone or trend.has_risen or trend.has_fallen:
        return Clear()
    is_constant = trend.constant_in_a_row >= max(CONSTANT, trend.num_losses - EARLY) and trend.recent_level != 0
    observed = view.reduced(OBSERVED_PARAMETERS)
    classes, unreached = trend.chance, _unreached(view, observed)
    if not is_constant and not classes and not unreached:
        return NotEvaluated("the loss did not fall, but nothing shows that it should have")
    if is_constant:
        level = f"the same to the last bit for {trend.constant_in_a_row} steps"
    elif classes:
        level = f"what guessing among {classes} classes costs (ln {classes} = {log(classes):.4g})"
    else:
        level = f"where it began ({number(trend.first_level)})"
    ratio = median(observed.ratios) if observed.ratios else nan
    is_slow = ratio < TINY
    parameters = [site.path for site in view.sites.values() if site.kind == "parameter"]
    return RULE.finding(
        Severity.CRITICAL,
        max(trend.first_step, 0),
        cause=f"after {updates} updates the loss is still {number(trend.recent_level)}, {level}{view.call_sites.at('backward')}"
        + (f"; an update changes the weights by only {number(ratio)} of their size" if is_slow else "")
        + (f"; no gradient reaches {len(unreached)} of {len(observed.is_reached)} parameters" if unreached else ""),
        fix="raise the learning rate: the updates are too small to matter"
        if is_slow
        else "check that labels belong to their inputs and that the output depends on the input; then try to fit a single batch",
        evidence={
            "first_level": trend.first_level,
            "recent_level": trend.recent_level,
            "updates": updates,
            "update_per_weight": ratio,
            **({"classes": classes} if classes else {}),
            **({"parameters_without_gradient": len(unreached)} if unreached else {}),
            **view.call_sites.evidence("backward"),
        },
        where=modules_of(unreached, parameters)[0] if unreached else "",
    )


def _unreached(view: RunView, observed: ObservedParameters) -> list[str]:
    """Parameters whose gradient was exactly zero whenever it was observed, if they are most of the model.

    The gradients of parameters that no optimizer holds are read at the end of the step. A program that updates them by hand has used and
    cleared them by then: that they change shows that a gradient reached them.
    """
    if observed.num_gradients < OBSERVED:
        return []
    zero = [view.sites[site] for site, reached in sorted(observed.is_reached.items()) if not reached and site in view.sites]
    paths = [site.path for site in zero if not (site.id in observed.changed and is_unowned(view, site))]
    return paths if len(paths) >= MOST * len(observed.is_reached) else []


RULE = Rule("loss-plateau", check, page=__doc__, reductions=(OBSERVED_PARAMETERS,))
