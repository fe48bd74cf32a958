"""How often a training called forward, backward, zero_grad, step …, summed over the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sonde.events import OptimizerCreated

if TYPE_CHECKING:
    from sonde.run_view.run_view import RunView

COUNTED = (
    "forwards", "eval_forwards", "backwards", "zero_grads", "clips", "optimizer_steps", "skipped_steps", "manual_updates",
    "scheduler_steps", "stale_updates", "empty_updates", "cleared_updates",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CallCounts:
    """Totals of the step scalars that count calls."""

    totals: Mapping[str, int]
    num_optimizers: int  # that were created

    @classmethod
    def of(cls, view: RunView) -> CallCounts:
        totals = {name: int(view.counts(name).sum()) for name in COUNTED}
        return cls(totals, len(view.events(OptimizerCreated)))

    def __getitem__(self, name: str) -> int:
        return self.totals[name]

    @property
    def updates(self) -> int:
        """Updates of parameters of every kind, skipped ones included."""
        return self["optimizer_steps"] + self["skipped_steps"] + self["manual_updates"]
