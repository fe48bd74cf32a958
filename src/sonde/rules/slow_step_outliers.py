"""Every so many steps, one takes several times as long as the others.

What it finds    slow steps that come at equal distances: something is done every n-th step, and costs as much as many steps.
Why it matters   the average step is what counts, and nobody sees it in a progress bar.
How it knows     a step is slow that took 2.5 times the median. Slow steps make a verdict only where they come regularly, so that a
                 machine that is busy at times makes none: of the steps at equal distances, four in five must be slow, of the others
                 hardly any, and there must be six of them. What they took beyond a usual step, beside the whole run, is the share.
                 Where it went is told by the phase that grew most, and by a look at one such step, line by line.
Known problems   validations and checkpoints are slow on purpose and have rules of their own; their time is left out here. A first step
                 of an epoch that waits for new workers is a matter of input-bound.
Fix              do it less often, or make it cheaper.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

from sonde.events import Finding, Step
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.timing import PHASES, Timing, Xrays, lines_of, severity, with_gain
from sonde.rules.words import amount, number

SLOW = 2.5  # times the usual step: on a busy machine single steps are slower too, but not at equal distances
SLOW_MS = 2.0  # and so much longer
FEWEST = 6  # slow steps at equal distances
NEAREST = 4  # steps between them: what happens more often is a part of the usual step
REGULAR = 0.8  # share of the steps at that distance that must be slow …
CHANCE = 0.1  # … and of the others that may be
SAVED = 0.8  # of what they take is promised: it is done less often, not never
MAX_KEPT = 256  # of the last slow steps
LOOKED = ("data", "transfer", "forward", "backward", "optimizer", "other")


@dataclass(slots=True)
class SlowStepOutliers:
    name: ClassVar[str] = "slow-step-outliers"
    explains: ClassVar[tuple[str, ...]] = ()

    timing: Timing = field(default_factory=Timing)
    xrays: Xrays = field(default_factory=Xrays)
    usual: dict[str, float] = field(default_factory=dict)  # ms by phase, refreshed now and then
    slow: deque[tuple[int, dict[str, float]]] = field(default_factory=lambda: deque(maxlen=MAX_KEPT))  # step, excess ms by phase
    last: int = -1

    def see(self, step: Step) -> None:
        self.xrays.see(step)
        if not self.timing.see(step):
            return
        self.last = step.number
        num = self.timing.num
        if num == 16 or num % 256 == 0:
            self.usual = {phase: self.timing.usual_ms(phase) for phase in LOOKED}
            if num == 16:  # those that came before it was known what is usual
                for index, row in enumerate(self.timing.kept):
                    self._look(self.timing.first_step + index, dict(zip(PHASES, row)))
                return
        if self.usual:
            self._look(step.number, {phase: step.scalars.get(f"{phase}_ms", 0.0) for phase in LOOKED})

    def _look(self, number_: int, times: Mapping[str, float]) -> None:
        usual = sum(self.usual.values())
        if sum(times[phase] for phase in LOOKED) > SLOW * usual + SLOW_MS:
            self.slow.append((number_, {phase: times[phase] - self.usual[phase] for phase in LOOKED}))

    def answer(self) -> Answer:
        timing = self.timing
        if reason := timing.too_short():
            return NotEvaluated(reason)
        period, regular = self._regular()
        if not period:
            return Clear()
        excess = {phase: sum(row[phase] for _, row in regular) / len(regular) for phase in LOOKED}
        each = sum(excess.values())
        share = each / (period * timing.total_ms / timing.num) if timing.total_ms else 0.0
        gain = SAVED * min(share, 1.0)
        if not timing.worth(gain):
            return Clear()
        phase = max(excess, key=lambda one: excess[one])
        line = self._line({step for step, _ in regular})
        at = str(line.get("line", ""))
        doing = {"other": "outside of forward, backward and update", "data": "waiting for data"}.get(phase, f"in the {phase}")
        return [
            Finding(
                rule=self.name,
                severity=severity(gain),
                where="",
                step=regular[0][0],
                cause=f"every {period} steps one takes {number(each + timing.usual_ms())} ms instead of {number(timing.usual_ms())} ms, "
                f"{doing}" + (f": {at} took {number(amount(line, 'ms'))} ms of it" if at else ""),
                fix=with_gain(f"do what happens every {period} steps less often, or make it cheaper", gain),
                evidence={
                    "gain": gain, "share": share, "steps_between": period, "num_slow": len(regular), "slow_ms": each + timing.usual_ms(),
                    "usual_ms": timing.usual_ms(), "phase": phase,
                    **({"source": at, "source_text": str(line.get("text", ""))} if at else {}),
                },
            )
        ]  # fmt: skip

    def _regular(self) -> tuple[int, list[tuple[int, dict[str, float]]]]:
        """The distance at which slow steps come, and those that do; 0 where they come as they like."""
        steps = [step for step, _ in self.slow]
        gaps = Counter(later - earlier for earlier, later in pairwise(steps) if later - earlier >= NEAREST)
        best: tuple[int, list[tuple[int, dict[str, float]]]] = (0, [])
        for period, _ in gaps.most_common(4):
            residues = Counter(step % period for step in steps)
            residue, num = residues.most_common(1)[0]
            first = next(step for step in steps if step % period == residue)
            possible = (self.last - first) // period + 1
            by_chance = len(steps) - num <= CHANCE * (self.last - steps[0])
            if num >= FEWEST and num >= REGULAR * possible and by_chance and num > len(best[1]):
                best = (period, [(step, row) for step, row in self.slow if step % period == residue])
        return best

    def _line(self, regular: Collection[int]) -> Mapping[str, Any]:
        """Of the slow steps that were looked at, the line that took the most beyond what it takes in others."""
        others = [
            {str(line.get("line")): amount(line, "ms") for line in lines_of(xray)[0]}
            for xray in (*self.xrays.regular, *self.xrays.slow)
            if xray["step"] not in regular
        ]
        extra: dict[str, float] = {}
        known: dict[str, Mapping[str, Any]] = {}
        for xray in (*self.xrays.slow, *self.xrays.regular):
            if xray["step"] not in regular:
                continue
            for line in lines_of(xray)[0]:
                name = str(line.get("line"))
                usual = min((other.get(name, 0.0) for other in others), default=0.0)
                extra[name] = extra.get(name, 0.0) + amount(line, "ms") - usual
                known[name] = line
        return known[max(extra, key=lambda one: extra[one])] if extra else {}
