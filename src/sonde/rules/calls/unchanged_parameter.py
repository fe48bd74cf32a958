"""A parameter gets gradients, an optimizer steps, and the parameter never changes.

What it finds    parameters that seem to be trained and are not: restored after each step, a group without effect, updates lost to rounding.
Why it matters   that part of the model stays as it was, and there is no error message.
How it knows     at every observed update the gradient was finite and non-zero and the learning rate above zero, but the change was exactly
                 zero; or the parameter changed and had the same values again, to the last bit, at the next step.
Known problems   not counted are steps without a gradient, steps that a GradScaler skipped, micro-batches without an update, a learning rate
                 of 0, and gradients so small that the update rounds away. Parameters that no optimizer holds are params-not-in-optimizer.
Fix              find what writes the old values back or keeps the parameter out of the step; train in float32 if updates round to nothing.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sonde.events import Finding, Kind, Severity, Site
from sonde.formatting import listing
from sonde.rules._shared.module_names import modules_of
from sonde.rules._shared.unowned_parameters import is_unowned, trainable_paths
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import Block, LayerTable, Reduction, RunView

PATIENCE = 3  # observed updates of the parameter's own optimizer, all of them: a single zero may be rounding
VISIBLE = 1e-5  # of the largest weight: what an update must reach to show in float32 with some room
STATISTICS = ("mean", "std", "min", "max", "l2")  # equal in all five to the last bit: the same values


@dataclass
class ObservedUpdates:
    """The updates of one parameter that should have changed it."""

    first_step: int
    statistics: npt.NDArray[np.floating]  # before the first update
    num_without_change: int = 0
    num_restored: int = 0  # changed by the update, but as before at the next
    has_changed: bool = False  # from one update to the next


@dataclass
class _State:
    num_observed: int = 0
    updates: dict[int, ObservedUpdates] = field(default_factory=dict)  # by site


def _reduce(block: Block, state: _State) -> _State:
    parameter, gradient, update = (block.get(kind) for kind in (Kind.PARAMETER, Kind.GRADIENT, Kind.UPDATE))
    if parameter is None or gradient is None or update is None:
        return state
    rates, is_skipped = block.scalar("lr"), (block.counts("skipped_steps") > 0) | (block.counts("empty_updates") > 0)
    rows = np.flatnonzero((block.counts("optimizer_steps") > 0) & ~is_skipped & (rates > 0))
    if not len(rows):
        return state
    state.num_observed += len(rows)
    sites, of_parameter, of_update = np.intersect1d(parameter.site_ids, update.site_ids, return_indices=True)
    before = np.stack([parameter[name] for name in STATISTICS], axis=-1)[rows][:, of_parameter]  # (steps, sites, statistics)
    largest = np.abs(before[..., STATISTICS.index("min") : STATISTICS.index("max") + 1]).max(axis=-1)
    can_change = ~(_expected_change(gradient, rates, sites)[rows] <= VISIBLE * largest)
    is_zero = (update["num"] > 0) & (update["l2"] == 0) & (update["nan"] == 0) & (update["inf"] == 0)
    is_zero = is_zero[rows][:, of_update]
    num_without_change, num_restored = (can_change & is_zero).sum(axis=0).tolist(), (can_change & ~is_zero).sum(axis=0).tolist()
    first_step = int(block.numbers[rows[0]])
    for column, site in enumerate(sites.tolist()):
        values = before[:, column]
        if site not in state.updates:
            state.updates[site] = ObservedUpdates(first_step, values[0].copy())  # without a reference to the block
            values = values[1:]
        seen = state.updates[site]
        seen.has_changed |= bool((values != seen.statistics).any())
        seen.num_without_change += num_without_change[column]
        seen.num_restored += num_restored[column]
    return state


def _expected_change(gradient: LayerTable, rates: npt.NDArray[np.float64], sites: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    """The least change that the gradients should cause (steps x sites); 0 without a finite gradient.

    SGD changes a weight by the learning rate times its gradient, Adam by about the learning rate: the smaller of the two counts.
    """
    is_usable = (gradient["l2"] > 0) & (gradient["nan"] == 0) & (gradient["inf"] == 0)
    largest = np.maximum(np.abs(gradient["min"]), np.abs(gradient["max"]))
    with np.errstate(invalid="ignore"):  # a learning rate of infinity times a gradient of 0
        change = np.where(is_usable, np.minimum(largest, 1.0) * rates[:, None], 0.0)
    expected = np.zeros((len(rates), len(sites)))
    _, at, of_gradient = np.intersect1d(sites, gradient.site_ids, return_indices=True)
    expected[:, at] = change[:, of_gradient]
    return expected


UPDATES = Reduction((Kind.PARAMETER, Kind.GRADIENT, Kind.UPDATE), _State, _reduce)


def check(view: RunView) -> Result:
    state = view.reduced(UPDATES)
    if state.num_observed < PATIENCE:
        return NotEvaluated(f"only {state.num_observed} updates with gradients were observed")
    unchanged = [
        (view.sites[site], seen)
        for site, seen in sorted(state.updates.items())
        if not seen.has_changed and site in view.sites and not is_unowned(view, view.sites[site])
    ]
    groups = (
        [(site, seen) for site, seen in unchanged if seen.num_without_change >= PATIENCE and not seen.num_restored],
        [(site, seen) for site, seen in unchanged if seen.num_restored >= PATIENCE],
    )
    return [
        _finding(view, group, state.num_observed, is_restored=is_restored)
        for is_restored, group in zip((False, True), groups)
        # A loss that fell although no parameter changes is a contradiction: an optimizer that acts on every k-th call, for instance.
        if group and not (view.loss_trend.has_fallen and len(group) == len(state.updates))
    ] or Clear()


def _finding(view: RunView, group: list[tuple[Site, ObservedUpdates]], num_observed: int, *, is_restored: bool) -> Finding:
    (first_site, first), paths = group[0], [site.path for site, _ in group]
    trainable = trainable_paths(view, first_site.model)
    modules = modules_of(paths, trainable)
    if is_restored:
        how = f"changed in {first.num_restored} observed updates and each time were back at the same values before the next"
        fix = "find what writes the old values back after the step"
    else:
        how = f"got non-zero gradients in {first.num_without_change} observed updates, and each time did not change at all"
        fix = "check the parameter group's learning rate and precision, and that its own optimizer is stepped"
    is_all = len(paths) >= len(trainable)
    return RULE.finding(
        Severity.CRITICAL if is_all else Severity.ERROR,
        min(seen.first_step for _, seen in group),
        cause=f"{len(paths)} of {len(trainable)} trainable parameters ({listing(modules)}) {how}{view.call_sites.at('optimizer_step')}",
        fix=fix,
        evidence={
            "num_unchanged": len(paths),
            "num_trainable": len(trainable),
            "observed_updates": num_observed,
            "modules": ", ".join(modules[:20]),
            "restored": "yes" if is_restored else "no",
            **view.call_sites.evidence("optimizer_step"),
        },
        where=modules[0] if len(modules) == 1 or not is_all else "",
    )


RULE = Rule(
    "unchanged-parameter",
    check,
    page=__doc__,
    needs=(Kind.PARAMETER, Kind.GRADIENT, Kind.UPDATE, "optimizer_steps", "lr"),
    explains=("loss-plateau", "dead-relu", "vanishing-gradient"),
    reductions=(UPDATES,),
)
