"""The training stands still while checkpoints are written.

What it finds    torch.save that takes a large share of the run.
Why it matters   a checkpoint protects against losing work; one that is written more often than work could be lost costs more than it saves.
How it knows     the time inside torch.save, summed over the run, beside everything else.
Known problems   what is saved by other means (safetensors, a database, another thread) is not seen. A single save at the end does not
                 stall anything: two are needed.
Fix              save less often, or only what changed (a state_dict instead of the whole model, without the optimizer).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import ClassVar

from sonde.events import Finding, Step
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.source import Sources
from sonde.rules.timing import Timing, severity, with_gain
from sonde.rules.words import number

FINE = 0.02  # share of the time that nobody minds: the proposal aims at it


@dataclass(slots=True)
class CheckpointStall:
    name: ClassVar[str] = "checkpoint-stall"
    explains: ClassVar[tuple[str, ...]] = ("slow-step-outliers",)

    timing: Timing = field(default_factory=Timing)
    sources: Sources = field(default_factory=Sources)
    num: int = 0  # steps before which something was saved

    def see(self, step: Step) -> None:
        self.sources.see(step)
        if self.timing.see(step) and step.scalars.get("checkpoint_ms", 0.0) > 0:
            self.num += 1

    def answer(self) -> Answer:
        timing = self.timing
        if reason := timing.too_short():
            return NotEvaluated(reason)
        share = timing.share("checkpoint")
        fewer = max(2, ceil(share / FINE))
        gain = share * (1 - 1 / fewer)
        if self.num < 2 or not timing.worth(gain):
            return Clear()
        every = timing.num / self.num
        return [
            Finding(
                rule=self.name,
                severity=severity(gain),
                where="",
                step=timing.first_step,
                cause=f"{100 * share:.0f} % of the time is torch.save{self.sources.at('checkpoint')}: it comes every "
                f"{number(round(every, 1))} steps and takes {number(timing.totals['checkpoint'] / self.num)} ms, a training step "
                f"{number(timing.usual_ms())} ms",
                fix=with_gain(f"save {fewer} times less often (every {ceil(every * fewer)} steps), or less at a time", gain),
                evidence={
                    "gain": gain, "checkpoint_share": share, "num_checkpoints": self.num, "steps_between": every,
                    "times_less_often": fewer, **self.sources.evidence("checkpoint"),
                },
            )
        ]  # fmt: skip
