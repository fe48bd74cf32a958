"""The learning rate schedulers of a run, how often they were stepped, and how the learning rates went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isnan, nan
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sonde.events import CallSiteFound, Ended, SchedulerCreated, SchedulerStarted
from sonde.formatting import number
from sonde.run_view.loss_trend import FALLEN, BucketedHistory
from sonde.run_view.source_lines_of_calls import source_evidence
from sonde.runlog.record_index import Ints

if TYPE_CHECKING:
    from sonde.run_view.run_view import RunView

COLLAPSED = 1.001e-3  # of its peak, with room for rounding: plans end there, or a little below, in their last updates
MAX_SCHEDULERS = 200
MAX_SERIES = 16  # learning rates that are followed; per-layer rates may make thousands
EVERY_UPDATE = 0.9  # scheduler steps per update from which on it is stepped with every update: a GradScaler may leave out some

_SHOWN = ("total_steps", "T_max", "T_0", "step_size", "milestones", "total_iters", "gamma", "patience")


@dataclass(frozen=True, slots=True)
class Scheduler:
    """One learning rate scheduler."""

    created: SchedulerCreated
    started: SchedulerStarted | None  # its first step

    @property
    def name(self) -> str:
        return self.created.class_name or "scheduler"

    @property
    def first_step(self) -> int:
        """-1 if it was never stepped."""
        return self.started.step if self.started else -1

    def __str__(self) -> str:
        """`StepLR(step_size=30, gamma=0.1)`."""
        arguments = ", ".join(f"{name}={_shown(self.created.plan[name])}" for name in _SHOWN if name in self.created.plan)
        return f"{self.name}({arguments})" if arguments else self.name

    def evidence(self) -> dict[str, float | str]:
        """The line that creates it."""
        return source_evidence(self.created.source, self.created.text)


@dataclass(frozen=True, slots=True)
class LearningRate:
    """One learning rate over the updates of the run."""

    num: int  # updates at which it is known
    first: float
    last: float
    peak: float
    peak_step: int
    lowest: float
    num_changes: int
    tail_step: int  # since when it is at COLLAPSED of its peak or below; -1: it is not
    tail_num: int  # updates since then
    learns_in_tail: bool  # the loss goes on falling although the rate has collapsed

    @classmethod
    def from_columns(cls, numbers: Ints, rates: npt.NDArray[np.float64], losses: npt.NDArray[np.float64]) -> LearningRate | None:
        """None if the rate is not known at any update. `losses` holds NaN in steps without a loss."""
        is_known = ~np.isnan(rates)
        numbers, rates, losses = numbers[is_known], rates[is_known], losses[is_known]
        if not len(rates):
            return None
        peaks = np.maximum(np.maximum.accumulate(rates), 0.0)
        is_collapsed = (rates <= COLLAPSED * peaks) & (peaks > 0)
        tail = int(np.flatnonzero(~is_collapsed)[-1]) + 1 if not is_collapsed.all() else 0
        has_tail = tail < len(rates)
        peak = float(peaks[-1])
        return cls(
            num=len(rates),
            first=float(rates[0]),
            last=float(rates[-1]),
            peak=peak,
            peak_step=int(numbers[np.argmax(rates)]) if peak > 0 else -1,
            lowest=float(rates.min()),
            num_changes=int(np.count_nonzero(rates[1:] != rates[:-1])),
            tail_step=int(numbers[tail]) if has_tail else -1,
            tail_num=len(rates) - tail,
            learns_in_tail=has_tail and _is_falling(losses[tail:]),
        )


def _is_falling(losses: npt.NDArray[np.float64]) -> bool:
    history = BucketedHistory(losses[np.isfinite(losses)])
    if len(history) < 4:
        return False
    early, late = history.between(0.0, 0.3), history.between(0.7, 1.0)
    return early.mean - late.mean > FALLEN * abs(early.mean)


@dataclass(frozen=True)
class LearningRateSchedule:
    """Who sets the learning rates, how often, and how they went."""

    schedulers: Mapping[int, Scheduler]
    num_steps: int  # of all schedulers, by the user's own calls
    num_updates: int  # steps with an optimizer step or a skipped one
    num_optimizers: int
    stepping: frozenset[int]  # optimizers that step
    lines: Sequence[tuple[str, str]]  # that step a scheduler: line, text
    ended: str  # how the training ended; "" while it runs, or when it was killed
    _view: RunView = field(repr=False)

    @classmethod
    def of(cls, view: RunView) -> LearningRateSchedule:
        sites = view.events(CallSiteFound)
        ended = view.events(Ended)
        return cls(
            schedulers=_schedulers(view),
            num_steps=view.calls["scheduler_steps"],
            num_updates=int(np.count_nonzero(_is_update(view))),
            num_optimizers=view.calls.num_optimizers,
            stepping=frozenset(site.optimizer or 0 for site in sites if site.call == "optimizer_step"),
            lines=[(site.line, site.text) for site in sites if site.call == "scheduler_step"][:MAX_SERIES],
            ended=ended[-1].how if ended else "",
            _view=view,
        )

    @cached_property
    def rates(self) -> dict[str, LearningRate]:
        """By name of the scalar: `lr`, `lr:1.2` …"""
        view, is_update = self._view, _is_update(self._view)
        losses, numbers = view.losses.value[is_update], view.step_numbers[is_update]
        names = [name for name in view.steps if name == "lr" or name.startswith("lr:")][:MAX_SERIES]
        found = {name: LearningRate.from_columns(numbers, view.steps[name][is_update], losses) for name in names}
        return {name: rate for name, rate in found.items() if rate is not None}

    @property
    def whole(self) -> list[Scheduler]:
        """Those that are no part of another."""
        parts = {part for one in self.schedulers.values() for part in one.created.parts}
        return [one for one in self.schedulers.values() if one.created.scheduler not in parts]

    @property
    def active(self) -> list[Scheduler]:
        """Those whose optimizer is known to train: another may be for a later stage."""
        return [one for one in self.whole if self.num_optimizers <= 1 or one.created.optimizer in self.stepping]

    @property
    def stepped(self) -> list[Scheduler]:
        return [one for one in self.whole if one.first_step >= 0]

    @property
    def steps_each(self) -> float:
        return self.num_steps / max(len(self.stepped), 1)

    @property
    def is_stepped_with_every_update(self) -> bool:
        return self.num_updates > 0 and self.steps_each >= EVERY_UPDATE * self.num_updates

    @property
    def has_step_for_every_update(self) -> bool:
        """One of the schedulers steps with every update, together or in turn: a short stage has its own, and then a long one."""
        return self.num_steps >= EVERY_UPDATE * self.num_updates

    @property
    def has_finished(self) -> bool:
        """The program came to its own end, with nothing wrong."""
        return self.ended in ("finished", "exit")

    def total(self, one: Scheduler) -> float:
        """After how many steps its plan is over; 0 if it has no end, or none that is known."""
        for key in ("total_steps", "T_max", "total_iters"):
            if (total := _float(one.created.plan.get(key))) > 0:
                return total
        parts = [self.schedulers[part] for part in one.created.parts if part in self.schedulers and part != one.created.scheduler]
        milestones = one.created.plan.get("milestones")
        if parts and isinstance(milestones, (list, tuple)) and milestones:
            last = self.total(parts[-1])
            return _float(milestones[-1]) + last if last else 0.0
        return max((self.total(part) for part in parts), default=0.0)

    def at(self) -> str:
        """` at train.py:41`: where a scheduler is stepped."""
        return f" at {self.lines[0][0]}" if self.lines else ""

    def evidence(self) -> dict[str, float | str]:
        return source_evidence(*self.lines[0]) if self.lines else {}


def _is_update(view: RunView) -> npt.NDArray[np.bool_]:
    is_update: npt.NDArray[np.bool_] = view.counts("skipped_steps") + view.counts("optimizer_steps") > 0
    return is_update


def _schedulers(view: RunView) -> dict[int, Scheduler]:
    started = {event.scheduler: event for event in view.events(SchedulerStarted)}
    created = view.events(SchedulerCreated)[:MAX_SCHEDULERS]
    return {event.scheduler: Scheduler(event, started.get(event.scheduler)) for event in created}


def _float(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else nan


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value) if isnan(_float(value)) else number(value)
