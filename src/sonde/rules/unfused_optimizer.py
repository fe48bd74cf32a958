"""The optimizer updates parameter by parameter in Python, where torch has one call for all of them.

What it finds    Adam, AdamW, Adagrad or SGD with momentum in its plain form on the CPU, taking a large share of the step.
Why it matters   the plain form passes over every parameter up to ten times and calls torch as often; the fused one passes once.
How it knows     the optimizer's share of the run, its class and its settings. What fused=True saves of it was measured on torch 2.13,
                 on few large and on many small parameters, and the least of that is promised. (foreach=True, the default on
                 devices, was measured too: on the CPU it gains little and is slower on large parameters.)
Known problems   the fused form rounds differently in the last bit, so a run is not bit-identical to one without. It needs plain
                 floating-point parameters, and a torch that has it for the class. On a device nothing is said: there the
                 default is not the plain form.
Fix              pass fused=True to the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.timing import Timing, with_gain
from sonde.rules.words import amount

# Share of the optimizer's time that fused=True saves, the least that was measured over 4 to 100 parameters of 100 to 2,000,000 elements:
SAVED = {"Adam": 0.55, "AdamW": 0.55, "Adagrad": 0.5, "SGD": 0.35}


@dataclass(slots=True)
class UnfusedOptimizer:
    name: ClassVar[str] = "unfused-optimizer"
    explains: ClassVar[tuple[str, ...]] = ()

    timing: Timing = field(default_factory=Timing)
    optimizers: list[Mapping[str, Any]] = field(default_factory=list)

    def see(self, step: Step) -> None:
        self.timing.see(step)
        for event in step.events:
            if event.kind == "optimizer" and len(self.optimizers) < 8:
                self.optimizers.append(event.data)

    def answer(self) -> Answer:
        timing = self.timing
        if reason := timing.too_short():
            return NotEvaluated(reason)
        if not self.optimizers:
            return NotEvaluated("no optimizer was seen")
        plain = [optimizer for optimizer in self.optimizers if _is_plain(optimizer)]
        if len(plain) < len(self.optimizers):
            return Clear()
        share = timing.share("optimizer")
        gain = share * min(SAVED[str(optimizer["class"])] for optimizer in plain)
        if not timing.worth(gain):
            return Clear()
        first = plain[0]
        num = sum(int(amount(group, "num_parameters")) for group in _groups(first))
        line, text = str(first.get("source", "")), str(first.get("text", ""))
        return [
            Finding(
                rule=self.name,
                severity=Severity.INFO,  # the plain form is torch's own default: no mistake, and no reason to call a training sick
                where="",
                step=timing.first_step,
                cause=f"{100 * share:.0f} % of the time is {first['class']}.step()"
                + (f", made at {line}" if line else "")
                + f", which updates {num} parameters one after the other",
                fix=with_gain(f"pass fused=True: torch.optim.{first['class']}(..., fused=True)", gain),
                evidence={
                    "gain": gain, "optimizer_share": share, "optimizer_ms": timing.usual_ms("optimizer"), "num_parameters": num,
                    **({"source": line, "source_text": text} if line else {}),
                },
            )
        ]  # fmt: skip


def _groups(optimizer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = optimizer.get("groups")
    return [group for group in groups if isinstance(group, Mapping)] if isinstance(groups, list) else []


def _is_plain(optimizer: Mapping[str, Any]) -> bool:
    """Has torch a fused form of it, that is not used?"""
    groups = _groups(optimizer)
    kind = optimizer.get("class")
    if kind not in SAVED or not groups or (kind == "SGD" and not any(amount(group, "momentum") for group in groups)):
        return False
    return all("fused" in group and not group["fused"] and group.get("device") == "cpu" for group in groups)
