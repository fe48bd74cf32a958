"""What is known of the schedulers of a run, and how the learning rates went: the ground on which the rules about schedules stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import Any

from sonde.events import Event, Step
from sonde.rules.activity import count
from sonde.rules.epochs import Epochs
from sonde.rules.learning import FALLEN, LossHistory, losses
from sonde.rules.words import number

COLLAPSED = 1.001e-3  # of its peak, with room for rounding: plans end there, or a little below, in their last updates
MAX_SCHEDULES = 200
MAX_SERIES = 16  # learning rates that are followed; per-layer rates may make thousands
EVERY_UPDATE = 0.9  # scheduler steps per update from which on it is stepped with every update: a GradScaler may leave out some

_CALLED = {"total_steps": "total_steps", "T_max": "T_max", "T_0": "T_0", "step_size": "step_size", "milestones": "milestones",
           "total_iters": "total_iters", "gamma": "gamma", "patience": "patience"}  # fmt: skip


@dataclass(slots=True)
class Schedule:
    index: int
    name: str  # class
    optimizer: int
    rates: list[float]  # after it was made
    initial: list[float]  # what its factors are of
    plan: Mapping[str, Any]
    parts: list[int]
    heard: bool  # its steps are known
    source: str
    text: str
    begun: int = -1  # step of its first step; -1: it never stepped
    before_optimizer: bool = False
    given: bool = False
    last_epoch: float = nan  # after its first step

    def __str__(self) -> str:
        """`StepLR(step_size=30, gamma=0.1)`."""
        told = ", ".join(f"{word}={_shown(self.plan[key])}" for key, word in _CALLED.items() if key in self.plan)
        return f"{self.name}({told})" if told else self.name


@dataclass(slots=True)
class Rate:
    """One learning rate over the run."""

    num: int = 0
    first: float = nan
    last: float = nan
    peak: float = 0.0
    peak_step: int = -1
    lowest: float = nan
    num_changes: int = 0
    tail_step: int = -1  # since when it is at COLLAPSED of its peak or below; -1: it is not
    tail_num: int = 0
    tail: LossHistory = field(default_factory=LossHistory)  # of the loss

    def see(self, step: int, rate: float, loss: float) -> None:
        self.num += 1
        if self.num == 1:
            self.first = self.lowest = rate
        self.num_changes += self.num > 1 and rate != self.last
        self.last = rate
        self.lowest = min(self.lowest, rate)
        if rate > self.peak:
            self.peak, self.peak_step = rate, step
        if rate > COLLAPSED * self.peak or not self.peak:
            self.tail_step = -1
            return
        if self.tail_step < 0:
            self.tail_step, self.tail_num, self.tail = step, 0, LossHistory()
        self.tail_num += 1
        if isfinite(loss):
            self.tail.add(loss)

    @property
    def learns_in_tail(self) -> bool:
        """The loss goes on falling although the rate has collapsed."""
        if len(self.tail.pieces) < 4:
            return False
        early, late = self.tail.between(0.0, 0.3), self.tail.between(0.7, 1.0)
        return early.mean - late.mean > FALLEN * abs(early.mean)


@dataclass(slots=True)
class Schedules:
    """A fold: who sets the rates, how often they did, and what became of them. Most runs have no scheduler, and pay for little."""

    always: bool = False  # rates are followed even where no scheduler is known
    made: dict[int, Schedule] = field(default_factory=dict)
    rates: dict[str, Rate] = field(default_factory=dict)
    epochs: Epochs = field(default_factory=Epochs)
    num_steps: int = 0  # of all schedulers, by the user's own calls
    num_updates: int = 0
    num_backwards: int = 0
    num_skipped: int = 0
    num_optimizers: int = 0
    stepping: set[int] = field(default_factory=set)  # optimizers that were seen to step, of the first calls
    lines: list[tuple[str, str]] = field(default_factory=list)  # that step a scheduler: line, text
    _num_scalars: int = 0
    ended: str = ""  # how the training ended; "" while it runs, or where it was killed

    def see(self, step: Step) -> None:
        self.epochs.see(step)
        for event in step.events:
            self._event(event)
        self.num_steps += count(step, "scheduler_steps")
        skipped, made = count(step, "skipped_steps"), count(step, "optimizer_steps")
        self.num_backwards += count(step, "backwards")
        self.num_skipped += skipped
        if not skipped + made:
            return
        self.num_updates += 1
        if not (self.made or self.always):
            return
        found, _ = losses(step)
        loss = next(iter(found.values()), nan)
        if len(step.scalars) != self._num_scalars:  # names come and do not go: they need not be looked through at every step
            self._num_scalars = len(step.scalars)
            names = [name for name in step.scalars if name == "lr" or name.startswith("lr:")][:MAX_SERIES]
            self.rates |= {name: Rate() for name in names if name not in self.rates and len(self.rates) < MAX_SERIES}
        for name, rate in self.rates.items():
            value = step.scalar(name)
            if value == value:
                rate.see(step.number, value, loss)

    def _event(self, event: Event) -> None:
        data = event.data
        if event.kind == "scheduler" and len(self.made) < MAX_SCHEDULES:
            index = int(data.get("scheduler", len(self.made)))
            self.made[index] = Schedule(
                index, str(data.get("class", "scheduler")), int(data.get("optimizer", 0)), _floats(data.get("rates")),
                _floats(data.get("initial")), data.get("plan") or {}, [int(part) for part in data.get("parts", ())],
                bool(data.get("heard", True)), str(data.get("source", "")), str(data.get("text", "")),
            )  # fmt: skip
        elif event.kind == "scheduler_begins" and data.get("scheduler") in self.made:
            one = self.made[data["scheduler"]]
            one.begun, one.before_optimizer = event.step, bool(data.get("before_optimizer"))
            one.given, one.last_epoch = bool(data.get("given")), _float(data.get("last_epoch"))
        elif event.kind == "source" and data.get("call") == "scheduler_step" and len(self.lines) < MAX_SERIES:
            self.lines.append((str(data.get("line", "")), str(data.get("text", ""))))
        elif event.kind == "optimizer":
            self.num_optimizers += 1
        elif event.kind == "source" and data.get("call") == "optimizer_step" and len(self.stepping) < MAX_SERIES:
            self.stepping.add(int(data.get("optimizer", 0)))
        elif event.kind == "end":
            self.ended = str(data.get("how", ""))

    # -- what follows ------------------------------------------------------------------------------

    @property
    def whole(self) -> Iterator[Schedule]:
        """Those that are no part of another."""
        parts = {part for one in self.made.values() for part in one.parts}
        return (one for one in self.made.values() if one.index not in parts)

    @property
    def live(self) -> list[Schedule]:
        """Those whose optimizer is known to train: another may be for a later stage."""
        return [one for one in self.whole if self.num_optimizers <= 1 or one.optimizer in self.stepping]

    @property
    def stepped(self) -> list[Schedule]:
        return [one for one in self.whole if one.begun >= 0]

    @property
    def steps_each(self) -> float:
        return self.num_steps / max(len(self.stepped), 1)

    @property
    def with_every_update(self) -> bool:
        return self.num_updates > 0 and self.steps_each >= EVERY_UPDATE * self.num_updates

    @property
    def keep_pace(self) -> bool:
        """One of the schedulers steps with every update, together or in turn: a short stage has its own, and then a long one."""
        return self.num_steps >= EVERY_UPDATE * self.num_updates

    @property
    def has_finished(self) -> bool:
        """The program came to its own end, with nothing wrong."""
        return self.ended in ("finished", "exit")

    def total(self, one: Schedule) -> float:
        """After how many steps its plan is over; 0 where it has no end, or none that is known."""
        for key in ("total_steps", "T_max", "total_iters"):
            if (total := _float(one.plan.get(key))) > 0:
                return total
        parts = [self.made[part] for part in one.parts if part in self.made]
        if parts and (milestones := one.plan.get("milestones")):
            last = self.total(parts[-1])
            return _floats(milestones)[-1] + last if last else 0.0
        return max((self.total(part) for part in parts), default=0.0)

    def at(self) -> str:
        """` at train.py:41`: where a scheduler is stepped."""
        return f" at {self.lines[0][0]}" if self.lines else ""

    def evidence(self) -> dict[str, float | str]:
        if not self.lines:
            return {}
        line, text = self.lines[0]
        return {"source": line, "source_text": text} if text else {"source": line}


def made_evidence(one: Schedule) -> dict[str, float | str]:
    """The line that made a scheduler."""
    if not one.source:
        return {}
    return {"source": one.source, "source_text": one.text} if one.text else {"source": one.source}


def _float(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else nan


def _floats(values: object) -> list[float]:
    return [_float(value) for value in values] if isinstance(values, (list, tuple)) else []


def _shown(value: Any) -> str:
    return f"[{', '.join(number(each) for each in value)}]" if isinstance(value, (list, tuple)) else number(value)
