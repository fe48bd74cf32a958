"""What watching cost the training, from the times that its steps recorded.

Sonde times its own code. The training pays more than that: torch has to call this code, and afterwards the processor's caches hold it
instead of the training's, whose next operations take longer. `benchmarks/own_cost.py` shows by how much, on pairs of trainings with and
without Sonde.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan

import numpy as np
import numpy.typing as npt

from sonde.events import Ended
from sonde.formatting import counted, number, percent
from sonde.run_view import RunView
from sonde.run_view.step_times import SETTLED

CALLED = 1.7  # what the work of every step costs, over its timed part
OBSERVING = 1.0  # the same for what an observed step does besides: arithmetic in one place, which its clock shows
SHARE_OF_CALLS = 0.5  # of the time of a step in which every tensor is measured: for runs in which no other step shows it
MAX_PAUSE = 4.0  # medians: a step that took longer was interrupted by another program
MUCH = 1.1, 10_000  # times as long as without Sonde, and milliseconds: the guide says what to switch off
SHORT_MS = 1_000  # added in all: a share says nothing of a training that is over in a moment

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Overhead:
    """What watching cost the training. A value that is not known is NaN."""

    ratio: float = nan  # time of all steps with Sonde over the time without
    num_observed: int = 0  # steps in which every tensor was measured
    observed_share: float = 0.0  # of all steps
    own_ms: float = nan  # added to all steps of all ranks
    step_ms: float = nan  # a usual step without Sonde
    per_step_ms: float = nan  # added to every step
    observing_ms: float = nan  # added to an observed step besides
    startup_ms: float = nan  # added before the training and in its first steps: imports, patches, buffers, first files
    num_incidents: int = 0  # searched for a cause
    incidents_ms: float = nan  # that the training waited for these searches; in no step

    def __str__(self) -> str:
        """What watching cost, as a sentence; empty if no times were recorded."""
        if not isfinite(self.ratio):
            return ""
        each = []
        if isfinite(self.per_step_ms):
            each.append(f"{_time(self.per_step_ms)} to the {_time(self.step_ms)} of each step")
        if isfinite(self.observing_ms) and self.observing_ms > 0:
            each.append(f"{_time(self.observing_ms)} {'more to each observed one' if each else 'to each observed step'}")
        parts = [f"Sonde added {' and '.join(each)}"] if each else []
        if not each or self.own_ms >= SHORT_MS:
            share = f"Sonde added {percent(max(0.0, self.ratio - 1))} to the training time"
            parts = [f"{share} ({' and '.join(each)})" if each else share]
        if isfinite(self.startup_ms):
            parts.append(f"{_time(self.startup_ms)} to start")
        if self.num_incidents and isfinite(self.incidents_ms):
            parts.append(f"{_time(self.incidents_ms)} to search for the causes of {counted(self.num_incidents, 'incident')}")
        return "; ".join(parts)

    @property
    def is_much(self) -> bool:
        """Whether the training takes notably longer because it is watched."""
        return self.ratio > MUCH[0] and self.own_ms > MUCH[1]


@dataclass(frozen=True, slots=True)
class _ProcessCost:
    """Times of one process, in milliseconds; NaN where it has no such steps."""

    step_ms: float  # of all timed steps, with Sonde
    added_ms: float  # of that
    usual_ms: float  # a step without Sonde
    calls_ms: float  # added to every step
    observing_ms: float  # added to an observed step besides
    start_ms: float  # added to the first steps besides


def measure_overhead(views: Sequence[RunView], rank: int | None) -> Overhead:
    """What watching cost in these processes. What a usual step costs is that of the last process of `rank`."""
    costs = [_measure_process(view) for view in views]
    shown = [(view, cost) for view, cost in zip(views, costs) if view.process.rank == rank]
    step_ms, added_ms = sum(cost.step_ms for cost in costs), sum(cost.added_ms for cost in costs)
    num_steps = sum(view.num_steps for view, _ in shown)
    num_observed = sum(int(np.count_nonzero(view.steps["observed"] == 1)) for view, _ in shown)
    ends = [end for view in views for end in view.events(Ended) if end.num_incidents]
    timed = [(view, cost) for view, cost in shown if cost.step_ms]
    # Imports and patches are in the last event, which a run that still trains or was killed does not have.
    starts_ms = [end.startup_ms for end in timed[-1][0].events(Ended) if end.startup_ms is not None] if timed else []
    startup_ms = timed[-1][1].start_ms + sum(starts_ms) if starts_ms else nan
    return Overhead(
        ratio=step_ms / (step_ms - added_ms) if step_ms > added_ms else nan,
        num_observed=num_observed,
        observed_share=num_observed / num_steps if num_steps else 0.0,
        own_ms=added_ms,
        step_ms=timed[-1][1].usual_ms if timed else nan,
        per_step_ms=timed[-1][1].calls_ms if timed else nan,
        observing_ms=timed[-1][1].observing_ms if timed else nan,
        startup_ms=startup_ms,
        num_incidents=sum(end.num_incidents or 0 for end in ends),
        incidents_ms=sum(end.incidents_ms or 0.0 for end in ends),
    )


def _measure_process(view: RunView) -> _ProcessCost:
    step_ms, own_ms, is_observed = view.steps["step_ms"], view.steps["sonde_ms"], view.steps["observed"] == 1
    with np.errstate(invalid="ignore"):
        is_timed = np.isfinite(step_ms) & np.isfinite(own_ms) & (step_ms >= own_ms) & (own_ms >= 0)
    step_ms, own_ms, is_observed = step_ms[is_timed], own_ms[is_timed], is_observed[is_timed]
    if not len(step_ms):
        return _ProcessCost(0.0, 0.0, nan, nan, nan, 0.0)
    is_settled = np.arange(len(step_ms)) >= min(SETTLED, len(step_ms) - 1)
    own_ms = _without_pauses(own_ms, is_settled & ~is_observed)
    observed_ms, calls_ms = _mean(own_ms[is_settled & is_observed]), _mean(own_ms[is_settled & ~is_observed])
    if not isfinite(calls_ms):
        calls_ms = SHARE_OF_CALLS * observed_ms
    besides_ms = OBSERVING * np.maximum(0.0, own_ms - calls_ms)
    added_ms = np.minimum(CALLED * np.minimum(own_ms, calls_ms) + besides_ms, step_ms)
    observing_ms = round(OBSERVING * max(0.0, observed_ms - calls_ms), 6) if isfinite(observed_ms) else nan
    usual_besides_ms = np.where(is_observed, np.nan_to_num(observing_ms), 0.0)
    return _ProcessCost(
        step_ms=float(step_ms.sum()),
        added_ms=float(added_ms.sum()),
        usual_ms=float(np.median(step_ms - added_ms)),
        calls_ms=CALLED * calls_ms,
        observing_ms=observing_ms,
        start_ms=max(0.0, float((besides_ms - usual_besides_ms)[~is_settled].sum())),
    )


def _without_pauses(own_ms: Floats, chosen: npt.NDArray[np.bool_]) -> Floats:
    """A chosen step in which another program had the processor for longer counts as a usual one."""
    usual_ms = float(np.median(own_ms[chosen])) if chosen.any() else nan
    with np.errstate(invalid="ignore"):
        return np.where(chosen & (own_ms > MAX_PAUSE * usual_ms), usual_ms, own_ms)


def _mean(own_ms: Floats) -> float:
    return float(own_ms.mean()) if len(own_ms) else nan


def _time(ms: float) -> str:
    """`0.11 ms`, `340 ms`, `1.2 s`: two digits, since the cost is an estimate."""
    return f"{number(float(f'{ms:.2g}'))} ms" if ms < 1000 else f"{number(float(f'{ms / 1000:.2g}'))} s"
