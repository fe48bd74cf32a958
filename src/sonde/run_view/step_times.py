"""Where the time of a training goes: phases of the steps, and the steps that the step profiler measured in detail.

Only settled steps count, since the first ones fill caches and allocate memory; the time of Sonde itself is left out. The usual step is a
median over many, so that other load on the machine makes no verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sonde.events import StepProfile
from sonde.run_view.step_columns import power_of_two_stride
from sonde.runlog.record_index import Ints

if TYPE_CHECKING:
    from sonde.run_view.run_view import RunView

PHASES = ("data", "transfer", "forward", "backward", "optimizer", "validation", "checkpoint", "other")
TRAINING = tuple(phase for phase in PHASES if phase not in ("validation", "checkpoint"))
SETTLED = 8  # steps that are not counted
ENOUGH = 25  # settled steps: a median over fewer may be chance
ENOUGH_S = 0.5  # of settled training: what is over sooner needs no advice
MAX_SAMPLED = 512  # steps that medians are taken over, at equal distances
LEAST_GAIN = 0.1  # of the whole time: less is not worth a change, and hard to tell from noise
WORTH_S = 0.3  # saved in this run
HEAVY_MS = 6.0  # a step that is shorter belongs to a model so small that torch's own work is most of it …
LONG_S = 60.0  # … and is worth a word only in a run that takes longer than this
QUICK = 20  # one step in so many is quicker: that much a machine that is busy with other things leaves alone
PREEMPTED_PER_S = 20  # involuntary context switches from which on other programs take the core: an idle machine has a few
MAX_PROFILES = 16
MAX_MS = 1e12  # 30 years: more comes from a damaged log


@dataclass(frozen=True)
class StepTimes:
    """How long steps and their phases took, without Sonde."""

    is_recorded: bool
    num: int  # settled steps
    first_step: int
    totals: Mapping[str, float]  # ms by phase
    rows: Ints = field(repr=False)  # of the settled steps, in the columns of the view
    sampled: npt.NDArray[np.float64] = field(repr=False)  # ms (steps, phases) of at most MAX_SAMPLED steps
    core_shares: Sequence[float] = ()  # share of the time in which the process had a core, of the profiled steps

    @classmethod
    def of(cls, view: RunView) -> StepTimes:
        with np.errstate(invalid="ignore"):
            is_timed = (view.steps["other_ms"] >= 0) & view.steps.is_present("step_ms")  # NaN if times are not logged
        rows = np.flatnonzero(is_timed & (view.step_numbers >= SETTLED))
        columns = [phase_ms(view, phase)[rows] for phase in PHASES]
        return cls(
            is_recorded=bool(is_timed.any()),
            num=len(rows),
            first_step=int(view.step_numbers[rows[0]]) if len(rows) else 0,
            totals={phase: float(column.sum()) for phase, column in zip(PHASES, columns)},
            rows=rows,
            sampled=np.stack([column[:: sample_stride(len(rows))] for column in columns], axis=1),
            core_shares=[core_share(event.machine) for event in view.events(StepProfile)[:MAX_PROFILES]],
        )

    @property
    def total_ms(self) -> float:
        return sum(self.totals.values())

    def share(self, *phases: str) -> float:
        """Of all the time."""
        return sum(self.totals[phase] for phase in phases) / (self.total_ms or 1.0)

    def usual_ms(self, *phases: str) -> float:
        """Median over steps; of the training itself if no phase is named."""
        return float(np.median(self._sampled_ms(phases or TRAINING))) if len(self.sampled) else 0.0

    def _sampled_ms(self, phases: Sequence[str]) -> npt.NDArray[np.float64]:
        total: npt.NDArray[np.float64] = self.sampled[:, [PHASES.index(phase) for phase in phases]].sum(axis=1)
        return total

    @property
    def training_share(self) -> float:
        """Of all the time, without validation and checkpoints: what is saved in a step is saved of this."""
        return self.share(*TRAINING)

    @property
    def reason_not_evaluated(self) -> str:
        """Why nothing can be said; empty if something can."""
        if not self.is_recorded:
            return "the run holds no times"
        if self.num < ENOUGH or self.total_ms < 1e3 * ENOUGH_S:
            return f"fewer than {ENOUGH} settled steps, or less than {ENOUGH_S} s of training, were seen"
        return ""

    @cached_property
    def _alone_ms(self) -> float:
        """What a step takes on a machine that does nothing else, by two estimates; the smaller one counts."""
        quick_ms = float(np.sort(self._sampled_ms(TRAINING))[len(self.sampled) // QUICK])
        return min(quick_ms, self.usual_ms() * (median(self.core_shares) if self.core_shares else 1.0))

    def is_worth(self, gain: float) -> bool:
        """Whether a change that saves this share of the time is worth making."""
        if gain < LEAST_GAIN or gain * self.total_ms < 1e3 * WORTH_S:
            return False
        return self._alone_ms >= HEAVY_MS or self._alone_ms * self.num >= 1e3 * LONG_S


def phase_ms(view: RunView, phase: str) -> npt.NDArray[np.float64]:
    """How long a phase took in each step of the view; 0 if that was not measured."""
    column = view.steps[f"{phase}_ms"]
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(column) < MAX_MS, column, 0.0)


def sample_stride(num: int) -> int:
    """The distance at which at most MAX_SAMPLED of so many steps are taken."""
    return power_of_two_stride(num, MAX_SAMPLED)


def core_share(machine: Mapping[str, Any]) -> float:
    """Of the time before a profiled step, the part in which the process had a core; 1 if nobody took it away. A line or a step takes so
    much less if nobody else computes."""
    preempted, share = (machine.get(name) for name in ("pushed_off_per_s", "cpu_share"))
    if not isinstance(preempted, (int, float)) or not preempted >= PREEMPTED_PER_S:
        return 1.0
    return max(0.0, min(1.0, share)) if isinstance(share, (int, float)) and share == share else 0.0
