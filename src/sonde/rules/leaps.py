"""Losses and gradient norms that leap far above the usual, what the look back found of them, and whether the training came back.

A fold that the rules of spikes share. The leaps are found again here from the scalars of the run: so they are known for every run, also
where nobody could look back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, isfinite, log
from statistics import median
from typing import Any

from sonde.events import Kind, Severity, Step
from sonde.rules.activity import count
from sonde.rules.learning import Learning, losses
from sonde.spike_detection import ENOUGH, LogNormBound, LossBound, RollingBound, Spike

MAX_LEAPS = 64  # that are remembered
RETURNS = 3  # losses back in the usual range: one may be luck
LOST_AFTER = 25  # losses that stay above it: until then a training may still be on its way back
RECURS = 3  # leaps by odd samples: once is a sample, three times is the data
EXTREME = 30.0  # times the width of the usual range: true values with heavy tails leave it by ten to twenty now and then
EXTREME_NORM = 1000.0  # times the usual: the largest in healthy programs is 127
FEW = 0.125  # of the batch: where a training diverges, some samples are always ahead of the others
ODD_INPUT = 10.0  # times the largest inputs of other batches: heavy tails stay below
UNITS = 100.0  # times: that far off, a batch is in other units, and the leap itself need not be extreme
LR_ROSE = 2.0  # times its median: a restart, or a mistake in a schedule
NUM_RATES = 64


@dataclass(slots=True)
class ObservedSpike:
    """One leap."""

    step: int
    where: str
    leap: Spike
    loss_bound: float  # below it the loss is usual, as it was before
    data: Mapping[str, Any] = field(default_factory=dict)  # what the look back found
    rate: tuple[float, float] = (0.0, 0.0)  # the learning rate as it was, and as it is
    num_after: int = 0  # losses since
    num_back: int = 0  # of these, usual ones

    @property
    def samples(self) -> list[int]:
        return [int(sample) for sample in self.data.get("samples") or ()]


@dataclass(slots=True)
class Leaps:
    """The leaps of one number: "loss" or "gradient"."""

    what: str
    learning: Learning = field(default_factory=Learning)
    num: int = 0
    seen: list[ObservedSpike] = field(default_factory=list)
    num_values: int = 0
    recents: dict[str, RollingBound] = field(default_factory=dict)
    usual_loss: LossBound = field(default_factory=LossBound)
    norms: dict[str, tuple[float, int]] = field(default_factory=dict)  # of each parameter's gradient: sum of logarithms, and how many
    largest_inputs: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_RATES))
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_RATES))

    def see(self, step: Step) -> None:
        self.learning.see(step)
        if any(event.kind == "optimizer" for event in step.events):  # another model or another task, as the training process takes it too
            self.recents.clear()
            self.usual_loss = LossBound()
        found, bad = losses(step)
        loss = next(iter(found.values()), float("nan"))
        before = self.usual_loss.bound
        with_the_loss = False
        if isfinite(loss) and not bad:
            with_the_loss = self.usual_loss.update(loss) is not None
        for leap in self.seen:
            if found or bad:
                leap.num_after += 1
                leap.num_back += not bad and loss <= leap.loss_bound
        if self.what == "loss":
            self._see_leaps(step, found, before)
        elif with_the_loss:  # of that the other rule speaks
            self._leap("grad_norm", step.scalar("grad_norm"))
        else:
            self._see_leaps(step, {"grad_norm": step.scalar("grad_norm")}, before)
        rate = step.scalar("lr")
        if isfinite(rate):
            self.rates.append(rate)
        self._see_frames(step)

    def _see_leaps(self, step: Step, values: Mapping[str, float], loss_bound: float) -> None:
        """Those of the scalars, and those that were looked back at: a part of an accumulated batch may leap, and not their mean."""
        looked = {str(event.data.get("where", "")): event.data for event in step.events if self._is_mine(event.kind, event.data)}
        for series, value in values.items():
            leap = self._leap(series, value) if not count(step, "skipped_steps") else None
            if leap is not None:
                looked.setdefault(series, {})
                self._add(step, series, leap, loss_bound, looked.pop(series))
        for series, data in looked.items():
            told = [float(each) for name in Spike._fields if isinstance(each := data.get(name), (int, float))]
            if len(told) == len(Spike._fields):
                self._add(step, series, Spike(*told), loss_bound, data)

    def _is_mine(self, kind: str, data: Mapping[str, Any]) -> bool:
        return kind == "spike" and data.get("what") == self.what

    def _leap(self, series: str, value: float) -> Spike | None:
        if not isfinite(value) or (self.what == "gradient" and value <= 0):
            return None
        self.num_values += 1
        recent = self.recents.get(series)
        if recent is None:
            recent = self.recents[series] = LossBound() if self.what == "loss" else LogNormBound()
        if self.what == "loss":
            return recent.update(value)
        leap = recent.update(log(value))
        return None if leap is None else Spike(*map(exp, leap))

    def _add(self, step: Step, series: str, leap: Spike, loss_bound: float, data: Mapping[str, Any]) -> None:
        self.num += 1
        if len(self.seen) < MAX_LEAPS:
            rate, usual = step.scalar("lr"), median(self.rates) if self.rates else float("nan")
            bound = leap.bound if self.what == "loss" and series == "loss" else loss_bound
            self.seen.append(ObservedSpike(step.number, series, leap, bound, dict(data), (usual, rate)))

    def _see_frames(self, step: Step) -> None:
        batch = step.frames.get(Kind.BATCH)
        if batch is not None:
            ends = [abs(value) for name in ("min", "max") for value in batch[name].tolist() if isfinite(value)]
            self.largest_inputs.append(max(ends, default=0.0))
        if self.what == "gradient":
            gradient = step.frames.get(Kind.GRADIENT)
            leapt = bool(self.seen) and self.seen[-1].step == step.number
            if gradient is None or leapt:
                return
            for site, norm in zip(gradient.sites.tolist(), gradient["l2"].tolist()):
                if site in step.sites and isfinite(norm) and norm > 0:
                    total, num = self.norms.get(step.sites[site].name, (0.0, 0))
                    self.norms[step.sites[site].name] = (total + log(norm), num + 1)

    # -- what follows from it -----------------------------------------------------------------------------

    @property
    def reason_not_evaluated(self) -> str:
        if not self.num_values:
            return "no loss was seen" if self.what == "loss" else "no gradients were seen"
        return "" if self.num_values >= ENOUGH else f"{self.num_values} steps are too few to know what is usual"

    def worst(self) -> ObservedSpike:
        """The one to speak of: what was never recovered from, then what the look back could explain, then the first."""
        return max(self.seen, key=lambda each: (self.is_lost(each), self.is_of_data(each), bool(each.data), -each.step))

    def is_lost(self, seen: ObservedSpike) -> bool:
        """The loss has not come back, and had the time for it, or never will."""
        return seen.num_back < RETURNS and (seen.num_after >= LOST_AFTER or (seen.num_after > 0 and self.learning.gone))

    def is_of_data(self, seen: ObservedSpike) -> bool:
        """A few samples carry it, without which all would be usual; or what went into the model is out of range."""
        data, samples = seen.data, seen.samples
        if self.input_factor(seen) >= ODD_INPUT or (samples and data.get("blame") == "input"):
            return True
        few = 0 < len(samples) <= max(1.0, FEW * float(data.get("batch_size") or 0))
        without = data.get("without")
        return few and isinstance(without, (int, float)) and without <= seen.leap.bound

    def input_factor(self, seen: ObservedSpike) -> float:
        """The largest number of this batch, over that of a usual one; 0 where that is not known."""
        ordered = sorted(self.largest_inputs)
        usual = ordered[-1 - len(ordered) // 8] if ordered else 0.0  # the batch itself may be among them, and others like it
        given = [abs(float(one.get(end) or 0.0)) for one in seen.data.get("inputs") or () for end in ("low", "high")]
        return max(given, default=0.0) / usual if usual > 0 else 0.0

    def severity(self) -> Severity:
        """A spike that passes is worth knowing. It is a fault where the training does not come back, or where the data makes it again and
        again; and only where the data is known to make it: tasks change, learning rates restart."""
        if any(self.is_lost(each) and self.is_of_data(each) for each in self.seen):
            return Severity.CRITICAL if self.learning.failing else Severity.ERROR
        extreme = [each for each in self.seen if self._is_extreme(each.leap) or self.input_factor(each) >= UNITS]
        if len(extreme) >= RECURS and sum(self.is_of_data(each) for each in extreme) >= RECURS - 1:
            return Severity.WARNING
        return Severity.INFO

    def _is_extreme(self, leap: Spike) -> bool:
        if self.what == "gradient":
            return leap.value > EXTREME_NORM * leap.usual
        return leap.value - leap.usual > EXTREME * (leap.high - leap.usual)

    def layer(self, seen: ObservedSpike) -> str:
        """The layer whose gradient left its own history most; else what the look back says."""
        norms = [(str(name), float(norm)) for name, norm in seen.data.get("gradients") or ()]
        largest = max((norm for _, norm in norms), default=0.0)
        known = [(name, norm / exp(self.norms[name][0] / self.norms[name][1])) for name, norm in norms
                 if norm >= 0.1 * largest and name in self.norms]  # fmt: skip
        if seen.samples or not known:
            return str(seen.data.get("layer", ""))
        return max(known, key=lambda pair: pair[1])[0].rpartition(".")[0]
