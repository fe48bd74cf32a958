"""The first step, and the first place in it, where the numbers of two runs differ.

Both runs are read step by step up to there. Within a step the order is that of the computation: parameters, batch, outputs of layers, loss,
gradients from the last layer to the first, the learning rate, updates. Only what both runs have measured is compared.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sonde.events import Frame, Kind, Site, Step
from sonde.run_view import RunView

SCALAR = "scalar"  # the kind of a difference in a number of the whole step
INEXACT = 1e-4  # relative: statistics that were computed by different kernels may differ by as much
EPSILONS = {"float64": 2.2e-16, "float32": 1.2e-7, "bfloat16": 7.8e-3, "float16": 9.8e-4}
ROUNDING = 64  # units in the last place: the effect of another order of summation within a layer
SINGLE = EPSILONS["float32"]  # statistics are stored in single precision
OF_THE_RANGE = frozenset({"mean", "std", "min", "max"})  # differ by rounding in proportion to the largest element, not to themselves
COUNTS_FIRST = ("num", "nan", "inf")  # reported if several statistics of a place differ; without these, the one that differs most

Key = tuple[str, str, str, int, int]


@dataclass(frozen=True, slots=True)
class Difference:
    """One number that differs."""

    step: int
    kind: str  # of frame (`sonde.events.Kind`), or "scalar"
    where: str  # the site, or the name of the scalar
    type: str  # class of the module, if it has one
    statistic: str
    a: float
    b: float
    relative: float  # to the larger of the two, or to the largest element of the tensor
    by_rounding: bool


@dataclass(frozen=True, slots=True)
class FirstDivergence:
    """Where the numbers of two runs differ first."""

    num_common: int  # steps that both have
    num_both_observed: int  # of these, how many were observed in both
    first: Difference | None  # None: no measured number differs
    from_the_start: bool  # in the parameters or the batch of the first common step: another seed or other data
    last_equal_step: int  # the last common step before the first difference; -1: there is none
    observed_before: int  # the last step before it that both observed; -1: none. In between, only scalars are compared
    nearest: Difference | None  # in the next step that both observed, if the first difference is in a step that they did not
    num_differing: int  # places, in the step that was observed in both
    num_compared: int
    meaning: str  # the likely source of such a difference; empty if there is none

    @property
    def meant_to_be_same(self) -> bool:
        """They start with equal numbers, so a later difference has a cause within the run."""
        return self.num_both_observed > 0 and not self.from_the_start


def find_first_divergence(a: RunView, b: RunView, *, exact: bool = True) -> FirstDivergence | None:
    """Where two runs differ first; None if they have no step in common.

    Args:
        exact: False if the statistics of the two were computed by different code and may differ in their last digits.
    """
    common, in_a, in_b = np.intersect1d(a.step_numbers, b.step_numbers, return_indices=True)
    if not len(common):
        return None
    both = common[(a.steps["observed"][in_a] == 1) & (b.steps["observed"][in_b] == 1)]
    comparer = _StepComparer(a, b, 0.0 if exact else INEXACT)
    first: Difference | None = None
    last_equal = observed_before = -1
    num_differing = num_compared = 0
    has_outputs = False  # in the step of the first difference
    nearest: Difference | None = None
    for one, other in _common_steps(a, b):
        is_observed = one.scalar("observed") == 1 and other.scalar("observed") == 1
        found = list(comparer.differences(one, other)) if first is None or is_observed else []
        if found and first is None:
            first, has_outputs = found[0], comparer.num_outputs > 0
        if first is None:
            last_equal = one.number
            observed_before = one.number if is_observed else observed_before
        elif is_observed:
            nearest = found[0] if found and one.number > first.step else None
            num_differing, num_compared = len({(each.kind, each.where) for each in found}), comparer.num_compared
            break
    start = first is not None and last_equal < 0 and first.kind in (Kind.PARAMETER, Kind.BATCH)
    meaning = _meaning(first, start, observed_before, is_observed=first.step in both, has_outputs=has_outputs) if first else ""
    return FirstDivergence(len(common), len(both), first, start, last_equal, observed_before, nearest, num_differing, num_compared, meaning)


def _common_steps(a: RunView, b: RunView) -> Iterator[tuple[Step, Step]]:
    in_a, in_b = a.process.steps(), b.process.steps()
    one, other = next(in_a, None), next(in_b, None)
    while one is not None and other is not None:
        if one.number == other.number:
            yield one, other
        ahead = one.number - other.number
        if ahead <= 0:
            one = next(in_a, None)
        if ahead >= 0:
            other = next(in_b, None)


class _StepComparer:
    """Compares steps. Which columns of two frames belong together is computed once per pair of layouts."""

    def __init__(self, a: RunView, b: RunView, tolerance: float) -> None:
        self._sites = a.sites, b.sites
        self._tolerance = tolerance
        self._pairs: dict[str, tuple[Any, Any, list[Site], npt.NDArray[np.intp], npt.NDArray[np.intp]]] = {}
        self.num_compared = 0
        self.num_outputs = 0  # of layers, among them

    def differences(self, a: Step, b: Step) -> Iterator[Difference]:
        """In the order of the computation."""
        self.num_compared = 0
        yield from self._frames(Kind.PARAMETER, a, b)
        yield from self._frames(Kind.BATCH, a, b)
        before = self.num_compared
        yield from self._frames(Kind.ACTIVATION, a, b)
        self.num_outputs = self.num_compared - before
        yield from self._scalars(a, b, [name for name in a.scalars if name == "loss" or name.startswith("loss:")])
        yield from reversed(list(self._frames(Kind.ACTIVATION_GRADIENT, a, b)))
        yield from reversed(list(self._frames(Kind.GRADIENT, a, b)))
        if a.scalar("observed") == b.scalar("observed"):  # an observed step sums the squares in another order
            yield from self._scalars(a, b, ["grad_norm"])
        yield from self._scalars(a, b, ["loss_scale", *(name for name in a.scalars if name == "lr" or name.startswith("lr:"))])
        yield from self._frames(Kind.UPDATE, a, b)

    def _scalars(self, a: Step, b: Step, names: list[str]) -> Iterator[Difference]:
        for name in names:
            one, other = a.scalar(name), b.scalar(name)
            bad = [_is_bad(step, name) for step in (a, b)]
            if one == other or all(bad) or ((one != one or other != other) and not any(bad)):
                continue  # equal, or not measured in both
            size = _relative(one, other)
            yield Difference(a.number, SCALAR, name, "", "value", one, other, size, size < ROUNDING * SINGLE and not any(bad))

    def _frames(self, kind: str, a: Step, b: Step) -> Iterator[Difference]:
        one, other = a.frames.get(kind), b.frames.get(kind)
        if one is None or other is None or one.fields != other.fields:
            return
        sites, in_a, in_b = self._matched(kind, one, other)
        if not sites:
            return
        self.num_compared += len(sites)
        left, right = one.values[:, in_a].astype(np.float64), other.values[:, in_b].astype(np.float64)
        if one.values.dtype != other.values.dtype:  # one was stored in double precision because of another site
            with np.errstate(over="ignore"):
                left, right = left.astype(np.float32).astype(np.float64), right.astype(np.float32).astype(np.float64)
        unequal = (left != right) & ~(np.isnan(left) & np.isnan(right))
        if not unequal.any():
            return
        sizes = _sizes(one.fields, left, right)
        unequal &= sizes > self._tolerance
        for column in np.flatnonzero(unequal.any(axis=0)).tolist():
            row = _worst(one.fields, unequal[:, column], sizes[:, column])
            site, size, statistic = sites[column], float(sizes[row, column]), one.fields[row]
            within = size <= ROUNDING * max(EPSILONS.get(site.dtype, SINGLE), SINGLE) and statistic not in (*COUNTS_FIRST, "hash")
            yield Difference(
                a.number, kind, named(site), site.type, statistic, float(left[row, column]), float(right[row, column]), size, within
            )

    def _matched(self, kind: str, a: Frame, b: Frame) -> tuple[list[Site], npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        known = self._pairs.get(kind)
        if known is None or known[0] is not a.sites or known[1] is not b.sites:
            places = {key(self._sites[1][i]): column for column, i in enumerate(b.sites.tolist()) if i in self._sites[1]}
            rows = [(site, column, places[key(site)]) for site, column in _in_order(self._sites[0], a) if key(site) in places]
            known = self._pairs[kind] = (
                a.sites, b.sites, [site for site, _, _ in rows],
                np.array([column for _, column, _ in rows], np.intp), np.array([column for _, _, column in rows], np.intp),
            )  # fmt: skip
        return known[2], known[3], known[4]


def key(site: Site) -> Key:
    """Identifies a site across runs, where its id differs."""
    return site.kind, site.model, site.path, site.call, site.item


def named(site: Site) -> str:
    """`encoder.2 (call 2) [1]`."""
    name = site.name or "(model)"
    return name + (f" (call {site.call + 1})" if site.call else "") + (f" [{site.item}]" if site.item else "")


def _in_order(sites: Mapping[int, Site], frame: Frame) -> list[tuple[Site, int]]:
    """In the order of the computation: ids are given when a site is first used."""
    return sorted(((sites[i], column) for column, i in enumerate(frame.sites.tolist()) if i in sites), key=lambda row: row[0].id)


def _is_bad(step: Step, series: str) -> bool:
    """The loss was computed and is not finite; a NaN without an event means that there was no loss."""
    return bool(np.isinf(step.scalar(series))) or any(
        event.kind == "nonfinite" and event.data.get("what") == "loss" and event.data.get("where") == series for event in step.events
    )


def _relative(a: float, b: float) -> float:
    if not (np.isfinite(a) and np.isfinite(b)):
        return float("inf")
    return float(abs(a / 2 - b / 2) / max(abs(a) / 2, abs(b) / 2))  # halved: the distance of two floats may overflow


def _sizes(fields: tuple[str, ...], a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The relative size of each difference."""
    scales = np.fmax(np.abs(a), np.abs(b))
    within = [row for row, name in enumerate(fields) if name in OF_THE_RANGE]
    if within:
        scales[within] = np.fmax.reduce(scales[within], axis=0)
    with np.errstate(all="ignore"):
        sizes = np.abs(a / 2 - b / 2) / (scales / 2)
    sizes[~np.isfinite(sizes)] = np.inf  # one of them is not finite
    sizes[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
    return np.asarray(sizes)


def _worst(fields: tuple[str, ...], unequal: npt.NDArray[np.bool_], sizes: npt.NDArray[np.float64]) -> int:
    for name in COUNTS_FIRST:
        if name in fields and unequal[fields.index(name)]:
            return fields.index(name)
    readable = [row for row in np.flatnonzero(unequal).tolist() if fields[row] != "hash"]
    rows = readable or np.flatnonzero(unequal).tolist()
    return int(max(rows, key=lambda row: float(sizes[row])))


def _meaning(first: Difference, start: bool, observed_before: int, *, is_observed: bool, has_outputs: bool) -> str:
    """The source of a difference at this place: everything before it in the step is equal."""
    if first.by_rounding and not start:
        return "by rounding alone: other threads, another library, or an operation that sums in no fixed order"
    if first.kind == Kind.PARAMETER:
        if start:
            return "they start from different parameters: another seed, initialisation or checkpoint"
        return f"an update after step {observed_before} differed, in a step that was not observed in both"
    if first.kind == Kind.BATCH:
        return "they got different data, or the same data in another order"
    if first.kind == Kind.ACTIVATION:
        if "Dropout" in first.type:
            return "the layer gets the same input and draws other random numbers"
        return "the layer gets the same input and has another output: its code, its mode (train or eval), its precision, or chance"
    if first.kind in (Kind.ACTIVATION_GRADIENT, Kind.GRADIENT):
        return "the forward pass is the same, its gradients are not: the loss, backward, clipping, or gradients that were not cleared"
    if first.kind == Kind.UPDATE:
        return "the gradients are the same, the updates are not: the class or the options of the optimizer"
    if first.where.startswith(("lr", "loss_scale")):
        return "the gradients are the same, the learning rate or the loss scale is not"
    if not is_observed:
        return "this step was not observed in both, so the place in it is not known (every=1 observes all)"
    if first.where.startswith("loss") and not has_outputs:
        return "no layer was measured in both, so its source is unknown"
    if first.where.startswith("loss"):
        return "the outputs of the layers are the same, the loss is not: its function, its targets or its reduction"
    return "the gradient norm differs, but no measured gradient does"
