"""Which parameters no optimizer holds, although gradients arrive at them and nothing ever changes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from sonde.events import Kind, Site, Step
from sonde.rules.activity import Activity

PATIENCE = 3  # observed steps with a gradient: a loss term that touches a module once is no training signal


@dataclass(slots=True)
class Ownership:
    """A fold over membership events and the gradient and update frames."""

    activity: Activity = field(default_factory=Activity)
    membership: Mapping[str, Any] | None = None
    first_step: int = -1
    num_received: dict[int, int] = field(default_factory=dict)  # site -> observed steps with a non-zero gradient
    changed: set[int] = field(default_factory=set)
    sites: Mapping[int, Site] = field(default_factory=dict)

    def see(self, step: Step) -> None:
        self.activity.see(step)
        self.sites = step.sites
        for event in step.events:
            if event.kind == "membership":
                self.membership = event.data
        gradient = step.frames.get(Kind.GRADIENT)
        if gradient is not None and self.membership is not None:
            if self.first_step < 0:
                self.first_step = step.number
            for site in gradient.sites[(gradient["l2"] > 0) | (gradient["nan"] > 0) | (gradient["inf"] > 0)].tolist():
                self.num_received[site] = self.num_received.get(site, 0) + 1
        update = step.frames.get(Kind.UPDATE)
        if update is not None:
            moved = (update["l2"] > 0) | (update["nan"] > 0) | (update["inf"] > 0)
            self.changed.update(update.sites[np.asarray(moved)].tolist())

    def neglected(self) -> list[Site]:
        """Parameters without an optimizer that got gradients and never changed, neither by training nor by hand."""
        if self.membership is None:
            return []
        unowned = set(self.membership.get("unowned", ()))
        return [
            site
            for number, times in sorted(self.num_received.items())
            if times >= PATIENCE
            and number not in self.changed
            and (site := self.sites.get(number)) is not None
            and (site.path in unowned or f"{site.model}.{site.path}" in unowned)
        ]

    def num_abandoned(self) -> int:
        """Parameters that an optimizer holds, that belong to no model of the run and get no gradient."""
        held = (self.membership or {}).get("optimizers", ())
        return sum(max(0, int(one.get("num_foreign", 0)) - int(one.get("num_foreign_with_grad", 0))) for one in held)

    def optimizes_something_else(self) -> bool:
        """The optimizers hold nothing of the models but tensors of their own that get gradients: an image, a prompt."""
        held = (self.membership or {}).get("optimizers", ())
        return any(one.get("num_foreign_with_grad") for one in held) and not any(one.get("num_owned") for one in held)

    def runs_after(self, model: str) -> bool:
        """Whether this model runs after another one that is trained: then its gradients may only pass through it."""
        first: dict[str, int] = {}
        for number, site in sorted(self.sites.items()):
            if site.kind == "output":
                first.setdefault(site.model, number)
        trained = {self.sites[number].model for number in self.changed if number in self.sites} - {model}
        return any(first.get(other, inf) < first.get(model, -inf) for other in trained)

    def trainable_paths(self, model: str) -> list[str]:
        return [s.path for s in self.sites.values() if s.kind == "parameter" and s.trainable and s.model == model]

    def reason_not_evaluated(self) -> str:
        """Why nothing can be said; empty where something can."""
        if not self.activity.num_optimizers:
            return "no optimizer was seen"
        if not self.activity.updates:
            return "no optimizer stepped"
        if self.membership is None:
            return "it is not known which parameters the optimizers hold"
        if int(self.membership.get("num_unowned", 0)) and not self.num_received:
            return "no gradients were observed"
        return ""
