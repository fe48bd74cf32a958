"""What makes a training diverge: the model, whose signal grows along its depth before any update, or the optimizer, whose updates are
larger than the weights?

Both end in the same way, so the earlier one counts.
"""

from dataclasses import dataclass
from math import isnan, nan

import numpy as np

from sonde.events import Kind
from sonde.formatting import number
from sonde.rules._shared.signal_growth_by_depth import KINDS, DepthProfiles, is_bias
from sonde.rules.column_helpers import first_number, first_where, largest_number
from sonde.run_view import Block, Reduction
from sonde.run_view.layer_statistics_in_blocks import Values

GROWTH = 1e3  # first layer over last, or last outputs over first: healthy models stay within a factor of twenty
UNEVEN = 100.0  # largest gradient of a bias over that of the last layer's: within ten in healthy recurrent models
LARGE_UPDATE = 0.5  # update over weights, whole model: healthy steps are 1e-4 to 1e-1


@dataclass(frozen=True, slots=True)
class SignalGrowth:
    """A signal that grows along the depth of the model before the first update."""

    step: int
    where: str
    sentence: str
    numbers: dict[str, float]
    is_both_ways: bool = False  # outputs forward and gradients backward: every update meets a chaotic surface


@dataclass(slots=True)
class DivergenceCause:
    """The state of the signal before the first update, and the size of the updates in the observed steps."""

    is_depth_known: bool = False  # the first gradients were examined
    growth: SignalGrowth | None = None
    large_update_step: int = -1  # the first one with an update of at least LARGE_UPDATE times the weights
    largest_ratio: float = nan  # of the update to the weights
    first_ratio: float = nan

    @property
    def has_large_update(self) -> bool:
        return self.large_update_step >= 0

    def evidence(self) -> dict[str, float | str]:
        numbers = self.growth.numbers if self.growth else {}
        return {"first_update_per_weight": self.first_ratio, "largest_update_per_weight": self.largest_ratio, **numbers}


def update_ratios(block: Block) -> Values:
    """The L2 norm of the update over that of the weights, of the whole model, for each step; NaN if it is not known."""
    update, parameter = block.get(Kind.UPDATE), block.get(Kind.PARAMETER)
    if update is None or parameter is None:
        return np.full(len(block), nan)
    # In float32, as the log has them, the squares of norms above 2e19 overflow.
    size, change = (np.sqrt(np.square(table["l2"], dtype=np.float64).sum(axis=1)) for table in (parameter, update))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        ratios: Values = np.where(size > 0, change / size, nan)
    return ratios


def _reduce(block: Block, state: DivergenceCause) -> DivergenceCause:
    if not state.is_depth_known and (Kind.ACTIVATION_GRADIENT in block or Kind.GRADIENT in block):
        state.is_depth_known = True
        # Only a signal that was measured before the first update can be blamed on the model alone.
        if not block.steps.counts("optimizer_steps")[: block.rows[0]].any():
            state.growth = _growth_with_depth(block)
    ratios = np.where(block.counts("optimizer_steps") > 0, update_ratios(block), nan)
    state.first_ratio = first_number(np.append(state.first_ratio, ratios))
    state.largest_ratio = largest_number(np.append(state.largest_ratio, ratios))
    large = first_where(ratios >= LARGE_UPDATE)
    if large is not None and not state.has_large_update:
        state.large_update_step = int(block.numbers[large])
    return state


def _growth_with_depth(block: Block) -> SignalGrowth | None:
    """In the first step of the block."""
    step, profiles = int(block.numbers[0]), DepthProfiles.of(block, over_time=True)
    backward, forward = float(profiles.backward[0]), float(profiles.forward[0])
    if isnan(backward):
        return _uneven_biases(block)
    if backward < GROWTH and forward < GROWTH:
        return None
    first, last = (block.sites[int(sites[0])].module for sites in (profiles.first_site, profiles.last_site))
    if backward >= forward:
        what, times, than = f"the gradient at {first} was", backward, f"that at {last}"
    else:
        what, times, than = f"the outputs near {last} were", forward, f"those of {first}"
    return SignalGrowth(
        step,
        first,
        f"before the first update {what} already {number(times)} times {than}",
        {"gradient_first_over_last": backward, "output_last_over_first": forward},
        is_both_ways=backward >= GROWTH and forward >= GROWTH,
    )


def _uneven_biases(block: Block) -> SignalGrowth | None:
    """In the first step of the block: if the depth is inside one module (a recurrent layer), the gradients of its parameters show it."""
    gradient = block.get(Kind.GRADIENT)
    if gradient is None:
        return None
    norms, nums = gradient["l2"][0].tolist(), gradient["num"][0].tolist()
    # The gradient of a bias does not depend on the scale of the layer's input, so it shows the signal alone.
    biases = [(site, norm) for site, norm, num in zip(gradient.sites, norms, nums) if site and is_bias(site) and num > 0 and norm > 0]
    if len(biases) < 2:
        return None
    (site, norm), (_, last) = max(biases, key=lambda row: row[1]), max(biases, key=lambda row: row[0].id)
    if norm < UNEVEN * last:
        return None
    return SignalGrowth(
        int(block.numbers[0]),
        site.module,
        f"before the first update the gradient of {site.path} was already {number(norm)}, {number(norm / last)} times that of the last "
        "layer's bias",
        {"gradient": norm, "gradient_of_last_layer": last},
    )


DIVERGENCE_CAUSE = Reduction(kinds=(*KINDS, Kind.UPDATE, Kind.PARAMETER), initial=DivergenceCause, reduce=_reduce)
