"""Losses and gradient norms far above their usual range: where they are, what the analysis of the step found, and whether the loss came
back.

The spikes are detected again from the scalars of the run, so they are known for every run, also if no step was analyzed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, isnan
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sonde.events import Kind, OptimizerCreated, Severity, SpikeDetected
from sonde.rules._shared.read_event_tables import amount
from sonde.rules._shared.unowned_parameters import UnownedParameters
from sonde.rules.column_helpers import Bools
from sonde.run_view import RunView
from sonde.run_view.loss_trend import loss_names
from sonde.spike_detection import ENOUGH, LogNormBound, LossBound, RollingBound, Spike

MAX_SPIKES = 64  # that are examined
RETURNS = 3  # losses back in the usual range: one may be luck
LOST_AFTER = 25  # losses that stay above it: until then a training may still be on its way back
RECURS = 3  # spikes by unusual samples: once is a sample, three times is the data
EXTREME = 30.0  # times the width of the usual range: true values with heavy tails leave it by ten to twenty now and then
EXTREME_NORM = 1000.0  # times the usual: the largest in healthy programs is 127
FEW = 0.125  # of the batch: if a training diverges, some samples are always ahead of the others
ODD_INPUT = 10.0  # times the largest inputs of other batches: heavy tails stay below
UNITS = 100.0  # times: that far off, a batch is in other units, and the spike itself need not be extreme
LR_ROSE = 2.0  # times its median: a restart, or a mistake in a schedule
NUM_RATES = 64
NUM_BATCHES = 64  # the last ones, whose inputs are the usual ones
MOST_OF_GRADIENT = 0.1  # of the largest norm: a parameter below it did not make the spike

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ObservedSpike:
    """One spike."""

    row: int
    step: int
    spike: Spike
    event: SpikeDetected | None  # what the analysis of the step found
    rate: float  # learning rate
    usual_rate: float  # before it
    num_after: int  # losses since
    num_back: int  # of these, usual ones
    input_factor: float  # largest number of this batch over that of a usual one; 0 if it is not known
    is_replaced: bool  # other parameters took the place of the model's around this step
    is_lost: bool  # the loss has not come back, and had the time for it, or never will

    @property
    def samples(self) -> Sequence[int]:
        """The samples that make it: none if the model is another one since this step."""
        return (self.event.samples or ()) if self.event and not self.is_replaced else ()

    @property
    def is_answered(self) -> bool:
        """The step was run again, and it is known which samples, if any, make the spike."""
        return self.is_of_data or (self.event is not None and self.event.samples is not None)

    @property
    def has_rate_risen(self) -> bool:
        return self.rate > LR_ROSE * self.usual_rate > 0

    @property
    def is_of_data(self) -> bool:
        """A few samples make it, without which all would be usual; or the inputs of the model are out of range."""
        if self.is_replaced:
            return False
        if self.input_factor >= ODD_INPUT:
            return True
        if self.event is None or not self.samples:
            return False
        if self.event.blame == "input":
            return True
        without = self.event.value_without_samples
        return len(self.samples) <= max(1.0, FEW * self.event.batch_size) and without is not None and without <= self.spike.bound


@dataclass(frozen=True, slots=True)
class SpikeHistory:
    """The spikes of one quantity."""

    what: str  # "loss" or "gradient"
    num_values: int  # that were checked
    num: int  # spikes
    spikes: Sequence[ObservedSpike]  # the first MAX_SPIKES

    @classmethod
    def of(cls, view: RunView, what: str) -> SpikeHistory:
        detected = view.remember(_detect)
        found = _with_events(view, what, detected)
        spikes = [_observe(view, what, detected, *each) for each in found[:MAX_SPIKES]]
        return cls(what, detected.num_values[what], len(found), spikes)

    @property
    def reason_not_evaluated(self) -> str:
        """Why nothing can be said without a spike; empty if something can."""
        if not self.num_values:
            return "no loss was seen" if self.what == "loss" else "no gradients were seen"
        return "" if self.num_values >= ENOUGH else f"{self.num_values} steps are too few to know what is usual"

    @property
    def worst(self) -> ObservedSpike:
        """The one to report: one without recovery, then one that the analysis explains, then the first."""
        return max(self.spikes, key=lambda each: (each.is_lost, each.is_of_data, each.event is not None, -each.step))

    def severity(self, failing: str) -> Severity:
        """A spike that passes is only mentioned. It is a fault if the training does not recover, or if the data causes it again and again;
        and only if the data is known to cause it: tasks change, learning rates restart."""
        if any(each.is_lost and each.is_of_data for each in self.spikes):
            return Severity.CRITICAL if failing else Severity.ERROR
        # How many spikes are analyzed in time depends on the load of the machine: what counts is what most of the answers say.
        factors = [each.input_factor for each in self.spikes if each.is_answered]
        has_other_units = bool(factors) and min(factors) >= UNITS
        extreme = [
            each
            for each in self.spikes
            if self._is_extreme(each.spike) or each.input_factor >= UNITS or (has_other_units and not each.is_answered)
        ]
        answers = [each.is_of_data for each in extreme if each.is_answered]
        if len(extreme) >= RECURS and sum(answers) > len(answers) / 2:
            return Severity.WARNING
        return Severity.INFO

    def _is_extreme(self, spike: Spike) -> bool:
        if self.what == "gradient":
            return spike.value > EXTREME_NORM * spike.usual
        return spike.value - spike.usual > EXTREME * (spike.high - spike.usual)

    def layer(self, view: RunView, chosen: ObservedSpike) -> str:
        """The layer whose gradient left its own history most; else the one that the analysis names."""
        event = chosen.event
        if event is None:
            return ""
        norms = {str(name): float(norm) for name, norm in event.gradients} if self.what == "gradient" and not chosen.samples else {}
        largest = max(norms.values(), default=0.0)
        usual = _usual_norms(view, norms, [each.row for each in self.spikes]) if norms else {}
        growth = {name: norm / usual[name] for name, norm in norms.items() if norm >= MOST_OF_GRADIENT * largest and name in usual}
        return max(growth, key=lambda name: growth[name]).rpartition(".")[0] if growth else event.layer


# ---- detection


class _Series(NamedTuple):
    """The spikes of one scalar."""

    spikes: dict[int, Spike]  # by row
    bounds: list[tuple[int, float]]  # a row, and the bound from the next row on

    def bound_before(self, row: int) -> float:
        return next((bound for at, bound in reversed(self.bounds) if at < row), inf)


@dataclass(frozen=True, slots=True)
class _Detected:
    """The spikes in the scalars of a run."""

    spikes: Mapping[str, Mapping[tuple[int, str], Spike]]  # "loss" or "gradient" -> row and name of the scalar
    num_values: Mapping[str, int]
    first_loss: _Series  # of the first loss of each step


def _detect(view: RunView) -> _Detected:
    restarts = [row for row, _ in view.events_with_rows(OptimizerCreated)]  # another model or task, as in the training process
    is_skipped = view.counts("skipped_steps") > 0
    first_loss = _detect_series(LossBound, view.losses.value, view.losses.has_loss & ~view.losses.is_nonfinite, restarts)
    series = {name: (view.steps[name], ~is_skipped & np.isfinite(view.steps[name])) for name in loss_names(view)}
    losses = {
        (row, name): spike
        for name, (column, is_value) in series.items()
        for row, spike in _detect_series(LossBound, column, is_value, restarts).spikes.items()
    }
    norms, is_with_loss = view.steps["grad_norm"], np.zeros(view.num_steps, bool)
    is_with_loss[list(first_loss.spikes)] = True
    is_norm = np.isfinite(norms) & (norms > 0) & (~is_skipped | is_with_loss)
    logs = np.log(norms, where=is_norm, out=np.zeros(view.num_steps))
    of_norm = _detect_series(LogNormBound, logs, is_norm, restarts).spikes
    gradients = {(row, "grad_norm"): Spike(*map(exp, spike)) for row, spike in of_norm.items()}
    num_values = {"loss": sum(int(is_value.sum()) for _, is_value in series.values()), "gradient": int(is_norm.sum())}
    return _Detected({"loss": losses, "gradient": gradients}, num_values, first_loss)


def _detect_series(new_bound: Callable[[], RollingBound], column: Floats, is_value: Bools, restarts: Sequence[int]) -> _Series:
    """The spikes of one column. The bound starts anew at each row of `restarts`."""
    found = _Series({}, [])
    rows = np.flatnonzero(is_value)
    for start, part in zip([0, *restarts], np.split(rows, np.searchsorted(rows, restarts))):
        bound, last = new_bound(), inf
        found.bounds.append((start - 1, inf))
        for row, value in zip(part.tolist(), column[part].tolist()):
            spike = bound.update(value)
            if spike is not None:
                found.spikes[row] = spike
            if bound.bound != last:
                last = bound.bound
                found.bounds.append((row, last))
    return found


def _with_events(view: RunView, what: str, detected: _Detected) -> list[tuple[int, str, Spike, SpikeDetected | None]]:
    """All spikes with what the analysis of their step found, in the order of steps. A part of an accumulated batch may be analyzed without
    a spike in the mean of its losses."""
    events = {(row, event.where): event for row, event in view.events_with_rows(SpikeDetected) if event.what == what}
    spikes = dict(detected.spikes[what])
    for place, event in events.items():
        recorded = Spike(event.value, event.median, event.low, event.high, event.bound)
        if place not in spikes and not any(map(isnan, recorded)):
            spikes[place] = recorded
    others = detected.first_loss.spikes if what == "gradient" else {}  # the gradient of a spike of the loss is a part of it
    return [(*place, spikes[place], events.get(place)) for place in sorted(spikes, key=lambda place: place[0]) if place[0] not in others]


def _observe(
    view: RunView, what: str, detected: _Detected, row: int, name: str, spike: Spike, event: SpikeDetected | None
) -> ObservedSpike:
    losses, rates = view.losses, view.steps["lr"]
    loss_bound = spike.bound if what == "loss" and name == "loss" else detected.first_loss.bound_before(row)
    is_later = np.arange(view.num_steps) > row
    num_after = int(np.count_nonzero(losses.has_loss & is_later)) + (losses.nonfinite_after_last and row < view.num_steps)
    with np.errstate(invalid="ignore"):
        num_back = int(np.count_nonzero(is_later & ~losses.is_nonfinite & (losses.value <= loss_bound)))
    before = rates[:row][np.isfinite(rates[:row])][-NUM_RATES:]
    step, parameters = view.step_number(row), view.remember(UnownedParameters.of)
    return ObservedSpike(
        row=row,
        step=step,
        spike=spike,
        event=event,
        rate=float(rates[row]) if row < view.num_steps else float("nan"),
        usual_rate=float(np.median(before)) if len(before) else float("nan"),
        num_after=num_after,
        num_back=num_back,
        input_factor=_input_factor(view, event) if event else 0.0,
        is_replaced=0 <= parameters.replaced_after < step <= parameters.replaced_before,
        is_lost=num_back < RETURNS and (num_after >= LOST_AFTER or (num_after > 0 and view.loss_trend.is_gone)),
    )


# ---- what is usual: read only if a step with a spike was analyzed, which happens at most three times in a run


def _input_factor(view: RunView, event: SpikeDetected) -> float:
    largest = max((abs(amount(tensor, end)) for tensor in event.inputs for end in ("low", "high")), default=0.0)
    usual = view.remember(_usual_input) if largest else 0.0
    return largest / usual if usual > 0 else 0.0


def _usual_input(view: RunView) -> float:
    """The largest number in a usual batch; 0 if no batch was measured."""
    largest: list[float] = []
    for block in view.blocks(Kind.BATCH, rows=view.observed_rows(Kind.BATCH)[-NUM_BATCHES:]):
        ends = np.abs(np.concatenate([block[Kind.BATCH]["min"], block[Kind.BATCH]["max"]], axis=1))
        largest += np.where(np.isfinite(ends), ends, 0.0).max(axis=1, initial=0.0).tolist()
    largest.sort()
    return largest[-1 - len(largest) // 8] if largest else 0.0  # the batch itself may be among them, and others like it


def _usual_norms(view: RunView, names: Mapping[str, float], spikes: Sequence[int]) -> dict[str, float]:
    """The geometric mean of the gradient norms of these parameters in the observed steps without a spike."""
    rows = view.observed_rows(Kind.GRADIENT)
    logs, nums = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
    for block in view.blocks(Kind.GRADIENT, rows=rows[~np.isin(rows, spikes)]):
        table = block[Kind.GRADIENT]
        for column, site in enumerate(table.sites):
            if site is not None and site.name in names:
                norms = table["l2"][:, column].astype(np.float64)
                norms = norms[np.isfinite(norms) & (norms > 0)]
                logs[site.name] += float(np.log(norms).sum())
                nums[site.name] += len(norms)
    return {name: exp(logs[name] / num) for name, num in nums.items() if num}
