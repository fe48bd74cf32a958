"""The memory of the process grows with every step, and nothing suggests that it will stop.

What it finds    outputs, features or batches that are stored and never thrown out; a cache without bounds; a list that a hook fills.
Why it matters   the training dies of it, at an hour that nobody chose, and swaps before that.
How it knows     after the first third of the steps, each quarter of the rest has more physical memory in use at its lowest than the one
                 before, at a rate that does not fall; and tensors of all ages pile up in one place, which is named. Without such a place
                 (arrays of numpy, Python objects) the growth is only mentioned.
Known problems   optimizer state, caches that fill once and batches of different lengths are over or even out in the first third.
                 deque(maxlen=…) and lru_cache(maxsize=…) are bounded and not counted. A buffer that is bounded by hand looks like a leak
                 until it is full. Memory that was grown in short runs, below 24 MiB in all, is not told.
Fix              empty it once it was used, bound it, or keep numbers instead of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sonde.events import Finding, Severity, Step
from sonde.formatting import size
from sonde.memory_trend import MIN_POINTS, MemoryTrend
from sonde.rules.leaks import Leaks, size_of
from sonde.rules.rule import Answer, Clear, NotEvaluated

LEAST_MB = 24.0  # MiB: allocators take memory in pieces, and a loop that prints and logs grows by a few
MB = 2**20


@dataclass(slots=True)
class MemoryGrowth:
    name: ClassVar[str] = "memory-growth"
    explains: ClassVar[tuple[str, ...]] = ("out-of-memory",)

    growth: MemoryTrend = field(default_factory=MemoryTrend)
    leaks: Leaks = field(default_factory=Leaks)
    limit: float = 0.0  # bytes
    limit_by: str = ""

    def see(self, step: Step) -> None:
        self.leaks.see(step)
        resident = step.scalar("rss_mb")
        if resident == resident:
            self.growth.update(step.number, resident)
        for event in step.events:
            if event.kind == "memory_limit" and isinstance(event.data.get("num_bytes"), (int, float)):
                self.limit, self.limit_by = float(event.data["num_bytes"]), str(event.data.get("by", ""))

    def answer(self) -> Answer:
        if self.growth.num_points < MIN_POINTS:
            return NotEvaluated(f"memory was looked at in fewer than {MIN_POINTS} steps")
        trend = self.growth.trend(LEAST_MB)
        if trend is None:
            return Clear()
        held = next(((step, leak) for step, leak in self.leaks.found), None)
        first, last, rate = size(trend.first * MB), size(trend.last * MB), f"{size(trend.per_step * MB)} per step"
        grown = f"memory grew from {first} to {last} between steps {trend.first_step} and {trend.last_step}"
        evidence: dict[str, float | str] = {"per_step": rate, "first": first, "last": last}
        if self.limit:
            left = (self.limit / MB - trend.last) / trend.per_step
            evidence["full_after_steps"] = float(max(0, round(left)))
            evidence["limit"] = f"{size(self.limit)} of {self.limit_by}"
        if held is None:
            return [
                Finding(
                    rule=self.name,
                    severity=Severity.INFO,
                    where="",
                    step=trend.first_step,
                    cause=f"{grown}, {rate}, and no unbounded pile of tensors explains it",
                    fix="look for a list or a cache of numpy arrays or Python objects that only grows, unless it is a buffer with a bound",
                    evidence=evidence,
                )
            ]
        step, leak = held
        return [
            Finding(
                rule=self.name,
                severity=Severity.WARNING,
                where="",
                step=step,
                cause=f"{grown}, {rate}: {str(leak.get('cause', '')).rstrip('.')}",
                fix=str(leak.get("fix", "")).rstrip("."),
                evidence={**evidence, "holder": str(leak.get("holder", "")), "kept": size_of(leak.get("num_bytes"))},
            )
        ]
