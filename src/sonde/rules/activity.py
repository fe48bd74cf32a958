"""What the loop did, counted: the ground on which the rules about calls stand."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import isfinite

from sonde.events import Step

COUNTED = (
    "forwards",
    "eval_forwards",
    "backwards",
    "zero_grads",
    "clips",
    "optimizer_steps",
    "skipped_steps",
    "manual_updates",
    "scheduler_steps",
    "stale_updates",
    "empty_updates",
    "cleared_updates",
)


def count(step: Step, name: str) -> int:
    """A scalar that counts; 0 where it was not recorded."""
    value = step.scalars.get(name, 0.0)
    return int(value) if isfinite(value) else 0


@dataclass(slots=True)
class Activity:
    """Totals over the run."""

    totals: Counter[str] = field(default_factory=Counter)
    num_optimizers: int = 0
    num_steps: int = 0

    def see(self, step: Step) -> None:
        self.num_steps += 1
        scalars, totals = step.scalars, self.totals
        for name in COUNTED:
            value = scalars.get(name)
            if value and isfinite(value):  # most are zero in most steps, and this runs for every rule
                totals[name] += int(value)
        self.num_optimizers += sum(event.kind == "optimizer" for event in step.events)

    @property
    def updates(self) -> int:
        """Every way in which parameters can have changed or were about to."""
        return self.totals["optimizer_steps"] + self.totals["skipped_steps"] + self.totals["manual_updates"]
