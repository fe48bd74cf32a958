"""The gradient vanishes on its way to the first layers, and the training makes no progress.

What it finds    a deep model whose first layers get next to no gradient: saturating activations, weights initialized too small, no
                 normalization.
Why it matters   the first layers stay random, and the layers above them cannot learn from noise.
How it knows     the gradient at the first layers is orders of magnitude below that at the last ones, falling layer by layer, and so is the
                 change of the weights by an update; in several observed steps in a row up to the last, while the loss does not move.
Known problems   a model that learns is never reported. Adam and its relatives divide by the size of the gradient: first layers that they
                 move like the last ones are not reported, however small the gradient. Gradients that are small everywhere have no slope. A
                 sudden drop at one place is something else: dead units, a detached value. Zeros in the first step (zero-initialized
                 branches) do not last.
Fix              use ReLU-like activations, normalization or residual connections, and an initialization that fits the activation.
"""

from dataclasses import dataclass, field
from math import isnan, nan

import numpy as np

from sonde.events import Kind, OptimizerCreated, Severity
from sonde.formatting import number
from sonde.rules._shared.signal_growth_by_depth import KINDS, LAST_SHARE, DepthProfiles, is_bias
from sonde.rules.column_helpers import Bools, last_streak
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import Block, Reduction, RunView
from sonde.run_view.layer_statistics_in_blocks import Values
from sonde.runlog.record_index import Ints

FADED = 1e-3  # first layer over last ones: the healthy controls sit between 0.05 and 20, eight sigmoids at 1e-5
PATIENCE = 3  # observed steps in a row, to the last: as many as every run has from its start
CLIFF = 0.8  # share of the decrease at one place: above it, the gradient does not vanish layer by layer
SLOW = 0.01  # update per weight of the first layers over that of the last ones: 1e-4 and less with SGD, 0.1 to 1 with Adam
UNSCALED = ("SGD", "ASGD")  # optimizers whose update is as small as the gradient


@dataclass(frozen=True, slots=True)
class LastProfile:
    """The last observed step with a profile."""

    first_over_last: float
    first_layer: str
    last_layer: str
    num_layers: int
    first_update: float  # update per weight of the first layers; NaN if it was not measured
    last_update: float  # of the last ones


@dataclass(slots=True)
class ProfiledSteps:
    """The observed steps with a gradient along the depth."""

    numbers: list[Ints] = field(default_factory=list)
    has_faded: list[Bools] = field(default_factory=list)
    moves: list[Bools] = field(default_factory=list)  # an update changes the first layers about as much as the last ones
    last: LastProfile | None = None


def _reduce(block: Block, state: ProfiledSteps) -> ProfiledSteps:
    profiles = DepthProfiles.of(block, over_time=False)
    rows = np.flatnonzero(~np.isnan(profiles.backward))
    if len(rows):
        last = rows[-1]
        first_layer, last_layer = (block.sites[int(sites[last])].module for sites in (profiles.first_site, profiles.last_site))
        state.numbers.append(block.numbers[rows])
        first_update, last_update = _updates_per_weight(block, block.sites[int(profiles.first_site[last])].model)
        moves = first_update > SLOW * last_update  # False if one is not known
        state.has_faded.append((profiles.backward[rows] <= FADED) & (profiles.steepest[rows] <= CLIFF))
        state.moves.append(moves[rows])
        state.last = LastProfile(
            float(profiles.backward[last]), first_layer, last_layer, int(profiles.num_layers[last]), float(first_update[last]),
            float(last_update[last]),
        )  # fmt: skip
    return state


def _updates_per_weight(block: Block, model: str) -> tuple[Values, Values]:
    """For each step, the update per weight of a model's first layers (median) and last ones (largest), without biases; NaN if unknown."""
    unknown = np.full(len(block), nan)
    update, parameter = block.get(Kind.UPDATE), block.get(Kind.PARAMETER)
    if update is None or parameter is None:
        return unknown, unknown
    shared, of_parameter, of_update = np.intersect1d(parameter.site_ids, update.site_ids, return_indices=True)
    sites = [block.sites.get(each) for each in shared.tolist()]
    is_weight = [site is not None and site.model == model and not is_bias(site) for site in sites]
    of_parameter, of_update = of_parameter[is_weight], of_update[is_weight]
    num = max(1, len(of_parameter) // LAST_SHARE)
    if len(of_parameter) < 2 * num:
        return unknown, unknown
    weights = parameter["l2"][:, of_parameter]
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.where(weights > 0, update["l2"][:, of_update] / weights, nan)
    return np.median(ratios[:, :num], axis=1), ratios[:, -num:].max(axis=1)


PROFILED_STEPS = Reduction(kinds=(*KINDS, Kind.UPDATE, Kind.PARAMETER), initial=ProfiledSteps, reduce=_reduce)


def check(view: RunView) -> Result:
    trend, profiled = view.loss_trend, view.reduced(PROFILED_STEPS)
    numbers = np.concatenate([np.empty(0, np.int64), *profiled.numbers])
    if len(numbers) < PATIENCE:
        return NotEvaluated("gradients along the depth of a model were not observed often enough")
    classes = [each.class_name for each in view.events(OptimizerCreated)]
    others = [name for name in classes if name not in UNSCALED]
    has_faded, moves = np.concatenate(profiled.has_faded), np.concatenate(profiled.moves)
    # With SGD alone the gradient is the evidence: where weights move without one, weight decay moves them.
    is_unscaled = bool(classes) and not others
    streak, last = last_streak(has_faded if is_unscaled else has_faded & ~moves), profiled.last
    if streak is None or streak.length < PATIENCE or last is None or not trend.stuck:
        return Clear()
    if isnan(last.first_update) and others:
        return NotEvaluated(f"updates were not measured, and with {others[0]} the size of a gradient does not say how far a weight moves")
    is_measured = not isnan(last.first_update) and not moves[-1]
    return RULE.finding(
        Severity.CRITICAL,
        int(numbers[streak.start]),
        cause=f"the gradient at {view.layer_name(last.first_layer)} is {number(last.first_over_last)} times that at "
        f"{view.layer_name(last.last_layer)}, {last.num_layers} layers on, in {streak.length} observed steps in a row"
        + (
            f"; an update changes the weights of the first layers by {number(last.first_update)} of their size, of the last ones by "
            f"{number(last.last_update)}"
            if is_measured
            else ""
        )
        + f", and {trend.stuck}",
        fix="use ReLU-like activations, normalization or residual connections, and an initialization that fits the activation",
        evidence={
            "first_over_last": last.first_over_last,
            "num_layers": last.num_layers,
            "last_layer": last.last_layer,
            "observed_steps": streak.length,
            **({"first_update_per_weight": last.first_update, "last_update_per_weight": last.last_update} if is_measured else {}),
            "first_loss": trend.first_level,
            "recent_loss": trend.recent_level,
        },
        where=last.first_layer,
    )


RULE = Rule(
    "vanishing-gradient", check, page=__doc__, explains=("loss-plateau", "unchanged-parameter", "dead-relu"), reductions=(PROFILED_STEPS,)
)
