"""A Python loop does in many small steps what torch could do in one.

What it finds    lines of your own code that run many times in every training step, a little work each time: a loop over samples, time
                 steps, elements or characters.
Why it matters   every torch call costs some microseconds before it computes anything, and Python itself is slower still: the loop takes
                 its time whatever the machine could do.
How it knows     in steps that were looked at closely, each line of your code was timed and counted. A line counts where it ran at
                 least 32 times in the step and took less than 0.1 ms each time; what all such lines of one function took, beside
                 the whole step, is its share. The gain is a part of that, since the work itself remains.
Known problems   a loop over layers or micro-batches runs a few times and has real work in it: it is not meant. A small model spends
                 most of its time in Python too, but in torch's, not in a loop of yours; and steps of a few milliseconds are only
                 spoken of in long runs. What a recurrence computes may have no other form than a loop: then a built-in (nn.GRU,
                 torch.cumsum) or torch.compile is the way. Not looked at where torch.compile is used or a
                 debugger traces the program. A loop that mostly takes numbers out of tensors is spoken of by host-sync.
Fix              write it as one operation on the whole tensor, or do it once before the training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sonde.events import Finding, Step
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.timing import Timing, Xrays, lines_of, severity, share_of_core, typical, with_gain
from sonde.rules.words import amount, number, rows_of

MANY = 32  # times in one step: loops over layers, heads and micro-batches are shorter
SMALL_MS = 0.1  # each time: a torch call on a small tensor takes 2 to 10 µs, a line has a few of them
SAVED = 0.7  # of their time is promised: one call instead of 32 or more leaves less than a tenth of it
XRAYS = 2  # steps that were looked at: a machine that is busy with something else would not be so twice in the same line


def is_small(line: Mapping[str, Any], xray: Mapping[str, Any]) -> bool:
    """Does it take little each time?"""
    return share_of_core(xray) * amount(line, "ms") <= SMALL_MS * amount(line, "num")


@dataclass(slots=True)
class PythonBound:
    name: ClassVar[str] = "python-bound"
    explains: ClassVar[tuple[str, ...]] = ("host-sync",)

    timing: Timing = field(default_factory=Timing)
    xrays: Xrays = field(default_factory=Xrays)

    def see(self, step: Step) -> None:
        self.timing.see(step)
        self.xrays.see(step)

    def answer(self) -> Answer:
        timing, xrays = self.timing, self.xrays.regular
        if reason := timing.too_short():
            return NotEvaluated(reason)
        if len(xrays) < XRAYS:
            return NotEvaluated(f"fewer than {XRAYS} steps were looked at closely")
        shares: list[dict[str, float]] = []
        worst: dict[str, Mapping[str, Any]] = {}
        for xray in xrays:
            lines, whole = lines_of(xray)
            found: dict[str, float] = {}
            read: dict[str, float] = {}  # by lines that take numbers out of tensors, which is a matter of host-sync
            reading = {str(wait.get("line")) for wait in rows_of(xray, "waits")}
            for line in lines:
                if amount(line, "num") < MANY or not is_small(line, xray):
                    continue
                place = f"{str(line.get('line')).rpartition(':')[0]}:{line.get('function')}"
                found[place] = found.get(place, 0.0) + amount(line, "ms")
                read[place] = read.get(place, 0.0) + (amount(line, "ms") if line.get("line") in reading else 0.0)
                if amount(line, "ms") > amount(worst.get(place, {}), "ms"):
                    worst[place] = line
            shares.append({place: ms / (whole or 1.0) for place, ms in found.items() if read[place] < 0.5 * ms})
        usual = typical(shares)
        place = max(usual, key=lambda one: usual[one], default="")
        share = usual.get(place, 0.0)
        gain = SAVED * share * timing.training_share
        if not timing.worth(gain):
            return Clear()
        line = worst[place]
        where, num, each = str(line.get("line", "")), amount(line, "num"), 1e3 * amount(line, "ms") / amount(line, "num")
        return [
            Finding(
                rule=self.name,
                severity=severity(gain),
                where="",
                step=self.xrays.first_step,
                cause=f"a loop in {line.get('function')} takes {100 * share:.0f} % of a step: {where} runs {number(num)} times in every "
                f"step, {number(each)} µs each time",
                fix=with_gain(
                    "write the loop as one operation on the whole tensor (or a built-in such as nn.GRU), or do before the training what "
                    "does not change from step to step",
                    gain,
                ),
                evidence={
                    "gain": gain, "loop_share": share, "times_per_step": num, "us_each": each, "function": str(line.get("function", "")),
                    "source": where, "source_text": str(line.get("text", "")),
                },
            )
        ]  # fmt: skip
