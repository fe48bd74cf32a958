"""A whole ReLU layer outputs zero for every sample, so nothing before it can learn.

What it finds    ReLU layers (modules or torch.relu) whose outputs are all zero: biases far below zero, or weights after one step too large.
Why it matters   a unit that always outputs zero gets no gradient and never recovers; a whole layer of them cuts the model in two.
How it knows     at least 99 % of the layer's outputs are zero, or its inputs are at or below zero with 99 % of the gradient zero, in
                 several observed steps in a row up to the last, while the loss does not move. If every gradient before the layer is exactly
                 zero, the loss may even fall: the last bias still fits the average.
Known problems   models that learn are not reported, however sparse (healthy ReLU layers have 30–80 % zeros). Of several dead layers the
                 last is named. If one large step made the layer dead, lr-divergence comes first. Zeros of dropout do not count.
Fix              lower the learning rate, start biases at zero, or use a leaky activation or normalization before it.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sonde.events import Kind, Severity
from sonde.formatting import listing, number
from sonde.rules.column_helpers import Bools, last_streak
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import Block, LayerTable, Reduction, RunView
from sonde.run_view.layer_statistics_in_blocks import Values

PATIENCE = 3  # observed steps in a row, to the last: one dead batch is chance; every run has three from its start
LATE = 0.5  # share of the run: a layer that is dead after it does not recover any more
QUARTER = 0.25  # of the starting loss, if no later step was observed: a last bias alone hardly gets below that
DEAD = 0.99  # share of zeros; healthy ReLU layers have 0.3–0.8
FAR_BELOW = 2.0  # standard deviations that the mean of a layer's output lies below zero: 98 % of it is negative then
RELU = ("ReLU", "ReLU6")
BEFORE_RELU = ("Linear", "LazyLinear", "Conv1d", "Conv2d", "Conv3d", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm", "GroupNorm")


class DeadLayer(NamedTuple):
    """A layer that is dead up to the last observed step."""

    since: int  # step
    num_steps: int  # observed ones
    share: float  # of zeros, in the last observed step


@dataclass(slots=True)
class DeadLayers:
    """The observed steps, and the layers that are dead in the last of them."""

    num_observed: int = 0
    last_observed: int = -1
    layers: dict[int, DeadLayer] = field(default_factory=dict)  # by site
    num_cut: int = 0  # observed steps, up to the last, in which no gradient at all passes a dead layer


def _reduce(block: Block, state: DeadLayers) -> DeadLayers:
    output, gradient = block.get(Kind.ACTIVATION), block.get(Kind.ACTIVATION_GRADIENT)
    if output is None:
        return state
    shares = _dead_shares(output, gradient)
    is_dead = ~np.isnan(shares)
    layers = {}
    for column in np.flatnonzero(is_dead[-1]).tolist():
        site, streak = int(output.site_ids[column]), last_streak(is_dead[:, column])
        assert streak is not None  # it is dead in the last step
        before = state.layers.get(site) if streak.start == 0 else None
        since = before.since if before else int(block.numbers[streak.start])
        layers[site] = DeadLayer(since, streak.length + (before.num_steps if before else 0), float(shares[-1, column]))
    cut = last_streak(_is_cut(is_dead, output, gradient))
    cut_before = state.num_cut if cut and cut.start == 0 else 0
    num_cut = cut.length + cut_before if cut else 0
    return DeadLayers(state.num_observed + len(block), int(block.numbers[-1]), layers, num_cut)


def _dead_shares(output: LayerTable, gradient: LayerTable | None) -> Values:
    """(steps x sites) The share of zeros in the outputs or in the gradient of each layer whose ReLU is dead; NaN for the others."""
    types = [site.type if site else "" for site in output.sites]
    zeros = output["zeros"] / np.maximum(output["num"], 1)
    is_relu_dead = (output["num"] > 1) & np.isin(types, RELU) & (zeros >= DEAD)
    shares: Values = np.where(is_relu_dead, zeros, np.nan)
    # A layer whose outputs lie below zero is dead only if its gradient is cut, too.
    is_below = (output["num"] > 1) & np.isin(types, BEFORE_RELU)
    is_below &= (output["max"] <= 0) | (output["mean"] + FAR_BELOW * output["std"] < 0)
    if gradient is None or not is_below.any():
        return shares
    zeros = np.where(gradient["num"] > 0, gradient["zeros"] / np.maximum(gradient["num"], 1), np.nan)
    last_alive = np.where(zeros < DEAD, gradient.site_ids.astype(np.int64), -1).max(axis=1, initial=-1)
    columns = {site: column for column, site in enumerate(gradient.site_ids.tolist())}
    for column, site in enumerate(output.site_ids.tolist()):
        if site in columns and is_below[:, column].any():
            cut = zeros[:, columns[site]]
            # Everything before a dead layer has no gradient either; only if a later layer still has one, this layer is the place.
            is_dead = is_below[:, column] & (cut >= DEAD) & (last_alive > site) & ~is_relu_dead.any(axis=1)
            shares[:, column] = np.where(is_dead, cut, shares[:, column])
    return shares


def _is_cut(is_dead: Bools, output: LayerTable, gradient: LayerTable | None) -> Bools:
    """Steps in which nothing before the dead layer gets any gradient, to the last bit: there is no way around the layer."""
    if gradient is None:
        return np.zeros(len(is_dead), bool)
    last_dead = np.where(is_dead, output.site_ids.astype(np.int64), -1).max(axis=1, initial=-1)
    is_before = (gradient.site_ids < last_dead[:, None]) & (gradient["num"] > 0)
    is_zero = (gradient["l2"] == 0) & (gradient["nan"] == 0)
    is_cut: Bools = is_before.any(axis=1) & (is_zero | ~is_before).all(axis=1)
    return is_cut


DEAD_LAYERS = Reduction(kinds=(Kind.ACTIVATION, Kind.ACTIVATION_GRADIENT), initial=DeadLayers, reduce=_reduce)


def check(view: RunView) -> Result:
    trend, state = view.loss_trend, view.reduced(DEAD_LAYERS)
    if state.num_observed < PATIENCE:
        return NotEvaluated(f"the outputs of the layers were observed in only {state.num_observed} steps")
    dead = {site: layer for site, layer in sorted(state.layers.items()) if layer.num_steps >= PATIENCE}
    failing = trend.stuck or _cut_off(view, state)
    if not dead or not failing:
        return Clear()
    site, first = min(dead.items(), key=lambda item: (item[1].since, item[0]))
    names = list(dict.fromkeys(view.sites[each].path for each in dead))
    path, is_module = view.sites[site].path, view.sites[site].type in RELU
    name = view.layer_name(path)
    subject = f"the ReLU after {name}" if not is_module else name if name != path else f"the ReLU {path}"
    others = f" (dead: {listing([view.layer_name(each) for each in names])})" if len(names) > 1 else ""
    return RULE.finding(
        Severity.CRITICAL,
        first.since,
        cause=f"{subject} outputs {number(100 * first.share)} % zeros "
        f"since step {first.since}, in {first.num_steps} observed steps in a row{others}, and {failing}",
        fix="lower the learning rate and start biases at zero; a leaky activation or normalization before it keeps units alive",
        evidence={
            "zero_share": first.share,
            "observed_steps": first.num_steps,
            "dead_layers": ", ".join(names[:20]),
            "first_loss": trend.first_level,
            "recent_loss": trend.recent_level,
        },
        where=path,
    )


def _cut_off(view: RunView, state: DeadLayers) -> str:
    """No gradient at all passes the layer, and as far as observed it stayed so; empty if not."""
    if state.num_cut < PATIENCE:
        return ""
    trend = view.loss_trend
    is_high = trend.is_readable and trend.recent_level > QUARTER * trend.first_level
    if not is_high and state.last_observed < LATE * view.last_step:
        return ""
    return "no gradient at all passes it, so that nothing of the input can be learned"


RULE = Rule(
    "dead-relu", check, page=__doc__, explains=("loss-plateau", "vanishing-gradient", "unchanged-parameter"), reductions=(DEAD_LAYERS,)
)
