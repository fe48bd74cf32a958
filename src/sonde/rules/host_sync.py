"""Python asks tensors for their numbers again and again: .item(), .tolist(), .cpu(), print.

What it finds    lines of your code that take numbers out of tensors in every training step, and cost a good part of it.
Why it matters   on a device each such call waits until everything before it is computed, and the device then waits for Python. On the CPU
                 there is nothing to wait for, but a call per element is slow, and so is printing a tensor.
How it knows     in steps that were looked at closely, every such call from your code was counted and timed. Where one line makes 16 or
                 more of them in a step, the time of that line counts; otherwise the time of the calls alone.
Known problems   one loss.item() per step is harmless on the CPU, and is not spoken of. On a device the time includes the computing that
                 was waited for, so the gain is an upper bound there. Calls that torch makes for itself, and those inside of
                 libraries, are not yours to change. Not looked at where torch.compile is used.
Fix              keep the numbers in tensors, sum them there, and read them once per some steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sonde.events import Finding, Step
from sonde.rules.python_bound import XRAYS, is_small
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.timing import Timing, Xrays, lines_of, severity, typical, with_gain
from sonde.rules.words import amount, number, rows_of

MANY = 16  # calls from one line in a step: then it is called for every element, and the loop around it goes too
SAVED = 0.8  # of the time is promised: once in a while the numbers are still wanted


@dataclass(slots=True)
class HostSync:
    name: ClassVar[str] = "host-sync"
    explains: ClassVar[tuple[str, ...]] = ()

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
        known: dict[str, Mapping[str, Any]] = {}
        for xray in xrays:
            lines, whole = lines_of(xray)
            shares.append({})
            by_line = {str(line.get("line")): line for line in lines}
            for wait in self._waits(xray):
                place = str(wait.get("line"))
                ms, line = amount(wait, "ms"), by_line.get(place, {})
                if amount(wait, "num") >= MANY and is_small(line, xray):
                    ms = max(ms, amount(line, "ms"))
                shares[-1][place] = ms / (whole or 1.0)
                known[place] = wait
        usual = typical(shares)
        share = sum(usual.values())
        gain = SAVED * share * timing.training_share
        if not timing.worth(gain):
            return Clear()
        place = max(usual, key=lambda one: usual[one])
        wait = known[place]
        num, call = amount(wait, "num"), str(wait.get("call", ""))
        others = sum(other > 0 for other in usual.values()) - 1
        return [
            Finding(
                rule=self.name,
                severity=severity(gain),
                where="",
                step=self.xrays.first_step,
                cause=f"{place} takes numbers out of tensors by {call}, {number(num)} times in every step"
                + (f", and {others} other lines do so too" if others else "")
                + f"; that is {100 * share:.0f} % of the step",
                fix=with_gain(
                    "keep the numbers in tensors, add them up there, and read the result once per some steps"
                    if call != "print"
                    else "print every hundredth step, and a number instead of a tensor",
                    gain,
                ),
                evidence={
                    "gain": gain, "share": share, "calls_per_step": num, "call": call, "source": place,
                    "source_text": str(wait.get("text", "")),
                },
            )
        ]  # fmt: skip

    @staticmethod
    def _waits(xray: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """One per line, with all of its calls."""
        merged: dict[str, dict[str, Any]] = {}
        for wait in rows_of(xray, "waits"):
            one = merged.setdefault(str(wait.get("line")), {**wait, "num": 0.0, "ms": 0.0})
            one["num"] += amount(wait, "num")
            one["ms"] += amount(wait, "ms")
        return list(merged.values())
