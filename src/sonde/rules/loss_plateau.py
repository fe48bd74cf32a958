"""The loss has not moved from the level of blind guessing since the beginning.

What it finds    a training that demonstrably learns nothing, where no other rule knows why.
Why it matters   every further step is wasted.
How it knows     over many updates the loss never fell, by a margin or beyond its noise, and it lies at ln K, the cost
                 of guessing among the K classes that the output has; or it is the same number to the last bit
                 although parameters are updated; or most parameters never got a gradient other than zero.
Known problems   flat is not stuck: fine-tuning at a low loss (K24), resuming at convergence (K25), a noise floor
                 (K27) and label smoothing (K13) lie away from ln K. Losses of adversaries (K19) and of policies (K18)
                 do not fall when all is well: with several losses, or with one that is not positive, the rule is not
                 evaluated. A loss of exactly 0 may be a solved task. Adapters, branches and experts without gradients
                 (K14, K15, K30) are in models whose loss falls. In-batch labels (K17), a single batch (K26) and a
                 second log_softmax (K20) fall like any other loss.
Fix              check that the labels belong to the inputs and that the output depends on the input; then try a
                 larger learning rate, and one batch alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log
from statistics import median
from typing import ClassVar

import numpy as np

from sonde.events import Finding, Kind, Severity, Site, Step
from sonde.rules.activity import Activity
from sonde.rules.learning import Learning
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.source import Sources
from sonde.rules.words import modules_of, number

ENOUGH = 50  # updates: warm-up and a hard start take tens
CONSTANT = 20  # losses in a row with the same bits: no two different batches cost exactly the same
EARLY = 5  # losses: a constant that begins later was reached, not there from the start
OBSERVED = 3  # steps whose gradients were looked at: zero-initialised branches have zero gradients in the first alone
MOST = 0.5  # share of the parameters that no gradient ever reached: idle experts and heads are fewer, and such models learn
TINY = 1e-5  # update per weight and step: healthy is 1e-4 to 1e-2


@dataclass(slots=True)
class LossPlateau:
    name: ClassVar[str] = "loss-plateau"
    explains: ClassVar[tuple[str, ...]] = ()

    activity: Activity = field(default_factory=Activity)
    learning: Learning = field(default_factory=Learning)
    sources: Sources = field(default_factory=Sources)
    ratios: list[float] = field(default_factory=list)  # update per weight, of the first observed steps
    reached: dict[int, bool] = field(default_factory=dict)  # parameter -> a non-zero gradient was ever observed at it
    num_observed: int = 0
    sites: Mapping[int, Site] = field(default_factory=dict)

    def see(self, step: Step) -> None:
        self.activity.see(step)
        self.learning.see(step)
        self.sources.see(step)
        self._see_gradient(step)
        update, parameter = step.frames.get(Kind.UPDATE), step.frames.get(Kind.PARAMETER)
        if update is not None and parameter is not None and len(self.ratios) < ENOUGH:
            size = float(np.sqrt(np.square(parameter["l2"]).sum()))
            if size > 0:
                self.ratios.append(float(np.sqrt(np.square(update["l2"]).sum())) / size)

    def _see_gradient(self, step: Step) -> None:
        gradient = step.frames.get(Kind.GRADIENT)
        if gradient is None:
            return
        self.num_observed += 1
        self.sites = step.sites
        there = (gradient["l2"] > 0) | (gradient["nan"] > 0) | (gradient["inf"] > 0)
        for site, some in zip(gradient.sites.tolist(), there.tolist()):
            self.reached[site] = some or self.reached.get(site, False)

    def _unreached(self) -> list[str]:
        """Parameters whose gradient was exactly zero whenever it was looked at, where they are most of the model."""
        if self.num_observed < OBSERVED:
            return []
        cut = [self.sites[site].path for site, some in sorted(self.reached.items()) if not some and site in self.sites]
        return cut if len(cut) >= MOST * len(self.reached) else []

    def answer(self) -> Answer:
        learning, updates = self.learning, self.activity.updates
        if learning.num_losses < ENOUGH or updates < ENOUGH:
            return NotEvaluated(f"fewer than {ENOUGH} updates with a loss were seen")
        if learning.several:
            return NotEvaluated("several losses are trained in turn, and none of them need fall")
        if not learning.readable:
            return NotEvaluated("the loss is not positive, so that its level says nothing")
        if learning.gone or learning.risen or learning.fallen:
            return Clear()
        constant = learning.constant_in_a_row >= max(CONSTANT, learning.num_losses - EARLY) and learning.recent_level != 0
        classes, unreached = learning.chance, self._unreached()
        if not constant and not classes and not unreached:
            return NotEvaluated("the loss did not fall, but nothing shows that it should have")
        ratio = median(self.ratios) if self.ratios else float("nan")
        level = number(learning.recent_level)
        if constant:
            at = f"the same to the last bit for {learning.constant_in_a_row} steps"
        elif classes:
            at = f"what guessing among {classes} classes costs (ln {classes} = {log(classes):.4g})"
        else:
            at = f"where it began ({number(learning.first_level)})"
        slow = ratio < TINY
        return [
            Finding(
                rule=self.name,
                severity=Severity.CRITICAL,
                where=modules_of(unreached, [s.path for s in self.sites.values() if s.kind == "parameter"])[0] if unreached else "",
                step=max(learning.first_step, 0),
                cause=f"after {updates} updates the loss is still {level}, {at}{self.sources.at('backward')}"
                + (f"; an update changes the weights by only {number(ratio)} of their size" if slow else "")
                + (f"; no gradient reaches {len(unreached)} of {len(self.reached)} parameters" if unreached else ""),
                fix="raise the learning rate: the updates are too small to matter"
                if slow
                else "check that labels belong to their inputs and that the output depends on the input; "
                "then try to learn a single batch by heart",
                evidence={
                    "first_level": learning.first_level,
                    "recent_level": learning.recent_level,
                    "updates": updates,
                    "update_per_weight": ratio,
                    **({"classes": classes} if classes else {}),
                    **({"parameters_without_gradient": len(unreached)} if unreached else {}),
                    **self.sources.evidence("backward"),
                },
            )
        ]
