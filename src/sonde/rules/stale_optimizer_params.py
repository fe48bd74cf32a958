"""The optimizer holds parameters that the model no longer has; the model trains with others.

What it finds    a head replaced, or a model copied, wrapped or re-created, after the optimizer was built.
Why it matters   the optimizer updates tensors that nobody uses, and the new ones stay as they were initialised.
                 Accuracy may hardly show it.
How it knows     an optimizer holds parameters that belong to no model of the run and never get a gradient, while
                 parameters of the model that no optimizer holds get gradients again and again and never change.
Known problems   a loose parameter given to the optimizer on purpose (a temperature, a prompt) gets gradients and is
                 no leftover. Leftovers alone, with every parameter of the model in some optimizer, are harmless and
                 not reported.
Fix              build the optimizer after the model has its final form.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.ownership import Ownership
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.source import Sources
from sonde.rules.words import listing, modules_of


@dataclass(slots=True)
class StaleOptimizerParams:
    name: ClassVar[str] = "stale-optimizer-params"
    explains: ClassVar[tuple[str, ...]] = (
        "params-not-in-optimizer", "grads-cleared-before-step", "missing-backward", "loss-plateau", "unchanged-parameter",
        "exploding-gradient", "vanishing-gradient", "dead-relu", "nonfinite-loss",
    )  # fmt: skip

    ownership: Ownership = field(default_factory=Ownership)
    sources: Sources = field(default_factory=Sources)

    def see(self, step: Step) -> None:
        self.ownership.see(step)
        self.sources.see(step)

    def answer(self) -> Answer:
        neglected, abandoned = self.ownership.neglected(), self.ownership.num_abandoned()
        if not neglected or not abandoned:
            reason = self.ownership.reason_not_evaluated()
            return NotEvaluated(reason) if reason else Clear()
        model = neglected[0].model
        everything = self.ownership.trainable_paths(model)
        mine = [site.path for site in neglected if site.model == model]
        places = modules_of(mine, everything)
        whole = len(mine) >= len(everything)
        return [
            Finding(
                rule=self.name,
                severity=Severity.CRITICAL if whole else Severity.ERROR,
                where=places[0] if len(places) == 1 else "",
                step=self.ownership.first_step,
                cause=f"the optimizer built{self.sources.at('optimizer')} holds {abandoned} parameters that are in no model that "
                f"ran, while {len(mine)} of the model's {len(everything)} trainable parameters ({listing(places)}) get gradients "
                "and are in no optimizer",
                fix="build the optimizer after the last change to the model (new head, copy, wrapping), or add the new parameters to it",
                evidence={
                    "num_abandoned": abandoned,
                    "num_unowned": len(mine),
                    "num_trainable": len(everything),
                    "modules": ", ".join(places[:20]),
                    **self.sources.evidence("optimizer"),
                },
            )
        ]
