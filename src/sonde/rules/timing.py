"""Where the time of a training goes: the ground on which the rules about speed stand.

Only settled steps count, since the first ones fill caches and ask for memory; what Sonde took is left out everywhere. The usual step is a
median over many, so that what else the machine did makes no verdict. And a verdict must be worth its reading: see `worth`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from sonde.events import Severity, Step
from sonde.rules.words import amount, rows_of

PHASES = ("data", "transfer", "forward", "backward", "optimizer", "validation", "checkpoint", "other")
SETTLED = 8  # steps that are not counted
ENOUGH = 25  # settled steps: a median over fewer may be chance
ENOUGH_S = 0.5  # of settled training: what is over sooner needs no advice
MAX_KEPT = 512  # steps that medians are taken over; when they are full, every other one is forgotten
LEAST_GAIN = 0.1  # of the whole time: less is not worth a change, and hard to tell from noise
BIG_GAIN = 0.4  # from here on it is a warning: to take 1.7 times as long as needed is probably a mistake, less may be a choice
WORTH_S = 0.3  # saved in this run
HEAVY_MS = 6.0  # a step that is shorter belongs to a model so small that torch's own work is most of it …
QUICK = 20  # one step in so many is quicker: that much a machine that is busy with other things leaves alone
PUSHED_OFF = 20  # times a second that others took its core away: an idle machine has a few, and there the clock can be trusted
LONG_S = 60.0  # … and is worth a word only in a run that takes longer than this
MAX_XRAYS = 16
# Rules that say how fast a training could be: as sound as before, and in a test suite a matter of what else the machine does.
SPEED = frozenset(
    {
        "checkpoint-stall", "cpu-oversubscribed", "host-sync", "input-bound", "python-bound", "silent-transfer", "slow-layer",
        "slow-step-outliers", "unfused-optimizer", "validation-dominates",
    }
)  # fmt: skip


@dataclass(slots=True)
class Timing:
    """How long steps and their phases took, without Sonde."""

    num: int = 0
    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))  # ms
    kept: list[tuple[float, ...]] = field(default_factory=list)  # ms, by phase
    stride: int = 1
    first_step: int = 0
    unknown: bool = True  # no times were recorded
    crowds: list[float] = field(default_factory=list)  # share of the time in which the process had a core, where others took it away

    def see(self, step: Step) -> bool:
        """False where the step does not count."""
        scalars = step.scalars
        for event in step.events:
            if event.kind == "xray" and len(self.crowds) < MAX_XRAYS:
                self.crowds.append(share_of_core(event.data))
        if not scalars.get("other_ms", -1.0) >= 0 or "step_ms" not in scalars:  # NaN where they are not to be logged
            return False
        self.unknown = False
        if step.number < SETTLED:
            return False
        if not self.num:
            self.first_step = step.number
        row = tuple(scalars.get(f"{phase}_ms", 0.0) for phase in PHASES)
        for phase, ms in zip(PHASES, row):
            self.totals[phase] += ms
        if self.num % self.stride == 0:
            if len(self.kept) >= MAX_KEPT:
                del self.kept[1::2]
                self.stride *= 2
            self.kept.append(row)
        self.num += 1
        return True

    @property
    def total_ms(self) -> float:
        return sum(self.totals.values())

    def share(self, *phases: str) -> float:
        """Of all the time."""
        return sum(self.totals[phase] for phase in phases) / (self.total_ms or 1.0)

    def usual_ms(self, *phases: str) -> float:
        """Median over steps; of the training itself where no phase is named."""
        wanted = [PHASES.index(phase) for phase in phases or _TRAINING]
        return median(sum(row[index] for index in wanted) for row in self.kept) if self.kept else 0.0

    @property
    def training_share(self) -> float:
        """Of all the time, without validation and checkpoints: what is saved in a step is saved of this."""
        return self.share(*_TRAINING)

    def too_short(self) -> str:
        """Why nothing can be said; empty where something can."""
        if self.unknown:
            return "the run holds no times"
        if self.num < ENOUGH or self.total_ms < 1e3 * ENOUGH_S:
            return f"fewer than {ENOUGH} settled steps and {ENOUGH_S} s of training were seen"
        return ""

    def worth(self, gain: float) -> bool:
        """Would anybody change a line for it?"""
        if gain < LEAST_GAIN or gain * self.total_ms < 1e3 * WORTH_S:
            return False
        wanted = [PHASES.index(phase) for phase in _TRAINING]
        quick_ms = sorted(sum(row[index] for index in wanted) for row in self.kept)[len(self.kept) // QUICK]
        # What a step takes where nobody else computes, by two accounts; the smaller one counts.
        alone_ms = min(quick_ms, self.usual_ms() * (median(self.crowds) if self.crowds else 1.0))
        return alone_ms >= HEAVY_MS or alone_ms * self.num >= 1e3 * LONG_S


_TRAINING = tuple(phase for phase in PHASES if phase not in ("validation", "checkpoint"))


def with_gain(advice: str, gain: float) -> str:
    return f"{advice}; that should save about {100 * gain:.0f} % of the time"


def severity(gain: float) -> Severity:
    return Severity.WARNING if gain >= BIG_GAIN else Severity.INFO


@dataclass(slots=True)
class Xrays:
    """The steps that were looked at closely, as far as they are settled."""

    regular: list[Mapping[str, Any]] = field(default_factory=list)
    slow: list[Mapping[str, Any]] = field(default_factory=list)
    first_step: int = 0

    def see(self, step: Step) -> None:
        for event in step.events:
            if event.kind == "xray":
                kept = self.slow if event.data.get("why") == "slow" else self.regular
                if not self.regular:
                    self.first_step = event.step
                if len(kept) >= MAX_XRAYS:
                    del kept[1::2]  # the first, and ever fewer of those after it
                kept.append({**event.data, "step": event.step})

    @property
    def machine(self) -> Mapping[str, Any]:
        """What was last said of cores and threads."""
        machines = [xray["machine"] for xray in self.regular if isinstance(xray.get("machine"), Mapping)]
        return machines[-1] if machines else {}


def share_of_core(xray: Mapping[str, Any]) -> float:
    """Of the time before that step, the part in which the process had a core; 1 where nobody took it away. A line or a step takes so
    much less where nobody else computes."""
    machine = xray.get("machine")
    if not isinstance(machine, Mapping) or amount(machine, "pushed_off_per_s") < PUSHED_OFF:
        return 1.0
    return min(1.0, amount(machine, "cpu_share"))


def lines_of(xray: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], float]:
    """The lines of a step and what all of them took, in ms."""
    lines = rows_of(xray, "lines")
    return lines, sum(amount(line, "ms") for line in lines)


def typical(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """For each place its median over the steps that were looked at; where it did not appear, its share was 0."""
    places = dict.fromkeys(place for step in shares for place in step)
    return {place: median(step.get(place, 0.0) for step in shares) for place in places}
