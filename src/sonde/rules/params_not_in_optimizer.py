"""A part of the model gets gradients, but no optimizer holds its parameters.

What it finds    an optimizer that was given only some of the parameters that should train.
Why it matters   that part stays as it was initialised; the rest must learn around it. Its gradients are never cleared
                 either: they only grow.
How it knows     trainable parameters that are in no optimizer, that receive non-zero gradients again and again, and
                 whose values never change.
Known problems   a frozen backbone (K02) has requires_grad=False or gets no gradient. A part that another optimizer
                 trained earlier in the run, or that the program moves by hand (target networks, averaged weights),
                 has changed and is left out. A whole model that runs after the trained one may be meant to stay (a
                 fixed critic whose parameters were not frozen): where the training does not fail, that is only worth
                 knowing. Where the optimizer holds an image or a prompt instead of the model (style transfer),
                 nothing is said. A head that was replaced after the optimizer was built is stale-optimizer-params.
                 Tied weights (K11) are one parameter under two names; idle experts and heads (K15, K32) are in the
                 optimizer.
Fix              give the optimizer all of model.parameters(), or set requires_grad_(False) on what must not train.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sonde.events import Finding, Severity, Site, Step
from sonde.rules.learning import Learning
from sonde.rules.ownership import Ownership
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.source import Sources
from sonde.rules.words import listing, modules_of


@dataclass(slots=True)
class ParamsNotInOptimizer:
    name: ClassVar[str] = "params-not-in-optimizer"
    explains: ClassVar[tuple[str, ...]] = (
        "loss-plateau", "unchanged-parameter", "exploding-gradient", "vanishing-gradient", "dead-relu", "nonfinite-loss",
    )  # fmt: skip

    ownership: Ownership = field(default_factory=Ownership)
    learning: Learning = field(default_factory=Learning)
    sources: Sources = field(default_factory=Sources)

    def see(self, step: Step) -> None:
        self.ownership.see(step)
        self.learning.see(step)
        self.sources.see(step)

    def answer(self) -> Answer:
        neglected = self.ownership.neglected()
        if not neglected or self.ownership.num_abandoned() or self.ownership.optimizes_something_else():
            reason = self.ownership.reason_not_evaluated()
            return NotEvaluated(reason) if reason else Clear()
        findings = []
        for model in dict.fromkeys(site.model for site in neglected):
            mine = [site for site in neglected if site.model == model]
            everything = self.ownership.trainable_paths(model)
            places = modules_of([site.path for site in mine], everything)
            whole = len(mine) >= len(everything)
            findings.append(
                Finding(
                    rule=self.name,
                    severity=self._severity(model, whole),
                    where=places[0] if len(places) == 1 else ("" if whole else max(places, key=lambda p: _size(p, mine))),
                    step=self.ownership.first_step,
                    cause=f"{len(mine)} of {len(everything)} trainable parameters ({listing(places)}) receive gradients, but no "
                    f"optimizer holds them, and they never changed; "
                    f"the optimizer is built{self.sources.at('optimizer') or ' without them'}",
                    fix="give all of model.parameters() to the optimizer, or freeze what must not train with requires_grad_(False)",
                    evidence={
                        "num_unowned": len(mine),
                        "num_trainable": len(everything),
                        "modules": ", ".join(places[:20]),
                        **({"model": model} if model else {}),
                        **self.sources.evidence("optimizer"),
                    },
                )
            )
        return findings

    def _severity(self, model: str, whole: bool) -> Severity:
        if not whole or not self.ownership.runs_after(model):
            return Severity.ERROR
        return Severity.WARNING if self.learning.stuck else Severity.INFO


def _size(place: str, sites: list[Site]) -> int:
    return sum(site.path == place or site.path.startswith(place + ".") for site in sites)
