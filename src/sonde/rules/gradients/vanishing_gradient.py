"""The gradient vanishes on its way to the first layers, and the training makes no progress.

What it finds    a deep model whose first layers get next to no gradient: saturating activations, weights initialized too small, no
                 normalization.
Why it matters   the first layers stay random, and the layers above them cannot learn from noise.
How it knows     the gradient at the first layers is orders of magnitude below that at the last ones, falling layer by layer, in several
                 observed steps in a row up to the last, while the loss does not move.
Known problems   a model that learns is never reported. Gradients that are small everywhere have no slope. A sudden drop at one place is
                 something else: dead units, a detached value. Zeros in the first step (zero-initialized branches) do not last.
Fix              use ReLU-like activations, normalization or residual connections, and an initialization that fits the activation.
"""

from dataclasses import dataclass, field

import numpy as np

from sonde.events import Severity
from sonde.formatting import number
from sonde.rules._shared.signal_growth_by_depth import KINDS, DepthProfiles
from sonde.rules.column_helpers import Bools, last_streak
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import Block, Reduction, RunView
from sonde.runlog.record_index import Ints

FADED = 1e-3  # first layer over last ones: the healthy controls sit between 0.05 and 20, eight sigmoids at 1e-5
PATIENCE = 3  # observed steps in a row, to the last: as many as every run has from its start
CLIFF = 0.8  # share of the decrease at one place: above it, the gradient does not vanish layer by layer


@dataclass(frozen=True, slots=True)
class LastProfile:
    """The last observed step with a profile."""

    first_over_last: float
    first_layer: str
    last_layer: str
    num_layers: int


@dataclass(slots=True)
class ProfiledSteps:
    """The observed steps with a gradient along the depth."""

    numbers: list[Ints] = field(default_factory=list)
    has_faded: list[Bools] = field(default_factory=list)
    last: LastProfile | None = None


def _reduce(block: Block, state: ProfiledSteps) -> ProfiledSteps:
    profiles = DepthProfiles.of(block, over_time=False)
    rows = np.flatnonzero(~np.isnan(profiles.backward))
    if len(rows):
        last = rows[-1]
        first_layer, last_layer = (block.sites[int(sites[last])].module for sites in (profiles.first_site, profiles.last_site))
        state.numbers.append(block.numbers[rows])
        state.has_faded.append((profiles.backward[rows] <= FADED) & (profiles.steepest[rows] <= CLIFF))
        state.last = LastProfile(float(profiles.backward[last]), first_layer, last_layer, int(profiles.num_layers[last]))
    return state


PROFILED_STEPS = Reduction(kinds=KINDS, initial=ProfiledSteps, reduce=_reduce)


def check(view: RunView) -> Result:
    trend, profiled = view.loss_trend, view.reduced(PROFILED_STEPS)
    numbers = np.concatenate([np.empty(0, np.int64), *profiled.numbers])
    if len(numbers) < PATIENCE:
        return NotEvaluated("gradients along the depth of a model were not observed often enough")
    streak, last = last_streak(np.concatenate(profiled.has_faded)), profiled.last
    if streak is None or streak.length < PATIENCE or last is None or not trend.stuck:
        return Clear()
    return RULE.finding(
        Severity.CRITICAL,
        int(numbers[streak.start]),
        cause=f"the gradient at {view.layer_name(last.first_layer)} is {number(last.first_over_last)} times that at "
        f"{view.layer_name(last.last_layer)}, {last.num_layers} layers on, in {streak.length} observed steps in a row, and {trend.stuck}",
        fix="use ReLU-like activations, normalization or residual connections, and an initialization that fits the activation",
        evidence={
            "first_over_last": last.first_over_last,
            "num_layers": last.num_layers,
            "last_layer": last.last_layer,
            "observed_steps": streak.length,
            "first_loss": trend.first_level,
            "recent_loss": trend.recent_level,
        },
        where=last.first_layer,
    )


RULE = Rule(
    "vanishing-gradient", check, page=__doc__, explains=("loss-plateau", "unchanged-parameter", "dead-relu"), reductions=(PROFILED_STEPS,)
)
