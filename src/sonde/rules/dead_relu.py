"""A whole ReLU layer puts out zero for every sample, so nothing before it can learn.

What it finds    ReLU layers (modules or torch.relu) that no longer fire: biases far below zero, a first step that
                 threw the weights away.
Why it matters   a unit that never fires gets no gradient and never comes back; a whole layer of them cuts the model
                 in two.
How it knows     at least 99 % of what the layer puts out is zero, or its input is at or below zero with at least 99 %
                 of the gradient gone, in several observed steps in a row up to the last, while the loss does not
                 move. Where every gradient before the layer is exactly zero, nothing of the input can be learnt: then
                 the loss may even fall, since the last bias still fits the average.
Known problems   sparse activations (K12, up to 100 % zeros at the start) belong to models that learn: then nothing is
                 said. Healthy ReLU layers sit at 30–80 % zeros. Layers before a dead one have no gradient either: the
                 one named is the last that is dead. A step too large that killed the layer is lr-divergence and comes
                 first. Zeros made by dropout (K08) or in the gradient of an embedding (K03) are not looked at.
Fix              lower the learning rate, start biases at zero, or use a leaky activation or normalisation before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from sonde.events import Finding, Kind, Severity, Step
from sonde.rules.learning import Learning
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.words import listing, number

PATIENCE = 3  # observed steps in a row, to the last: one dead batch is chance; every run has three from its start
LATE = 0.5  # share of the run: a layer seen dead after it will not wake up any more
QUARTER = 0.25  # of the starting loss, where nobody looked later: less than that a last bias hardly reaches by itself
DEAD = 0.99  # share of zeros; healthy ReLU layers sit at 0.3–0.8
FAR_BELOW = 2.0  # standard deviations that the mean of a layer's output lies below zero: 98 % of it is negative then
RELU = ("ReLU", "ReLU6")
BEFORE_RELU = ("Linear", "LazyLinear", "Conv1d", "Conv2d", "Conv3d", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm", "GroupNorm")


@dataclass(slots=True)
class DeadRelu:
    name: ClassVar[str] = "dead-relu"
    explains: ClassVar[tuple[str, ...]] = ("loss-plateau", "vanishing-gradient", "unchanged-parameter")

    learning: Learning = field(default_factory=Learning)
    num_observed: int = 0
    last_observed: int = -1
    last_step: int = -1
    rows: dict[int, int] = field(default_factory=dict)  # site -> observed steps in a row that it was dead
    since: dict[int, int] = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)
    shares: dict[int, float] = field(default_factory=dict)
    cut_in_a_row: int = 0  # observed steps in which no gradient at all came past a dead layer

    def see(self, step: Step) -> None:
        self.learning.see(step)
        self.last_step = step.number
        if Kind.ACTIVATION not in step.frames:
            return
        self.num_observed += 1
        self.last_observed = step.number
        dead = _dead(step)
        self.cut_in_a_row = self.cut_in_a_row + 1 if dead and _is_cut(step, max(dead)) else 0
        for site in [site for site in self.rows if site not in dead]:
            del self.rows[site], self.since[site]
        for site, share in dead.items():
            self.rows[site] = self.rows.get(site, 0) + 1
            self.since.setdefault(site, step.number)
            self.paths[site] = step.sites[site].path
            self.shares[site] = share

    def answer(self) -> Answer:
        if self.num_observed < PATIENCE:
            return NotEvaluated(f"the outputs of the layers were observed in only {self.num_observed} steps")
        dead = sorted(site for site, times in self.rows.items() if times >= PATIENCE)
        failing = self.learning.stuck or self._cut_off()
        if not dead or not failing:
            return Clear()
        first = min(dead, key=lambda site: (self.since[site], site))
        names = list(dict.fromkeys(self.paths[site] for site in dead))
        return [
            Finding(
                rule=self.name,
                severity=Severity.CRITICAL,
                where=self.paths[first],
                step=self.since[first],
                cause=f"{number(100 * self.shares[first])} % of what {self.paths[first]} gives to its ReLU is cut to zero since step "
                f"{self.since[first]}, in {self.rows[first]} observed steps in a row"
                + (f" (dead: {listing(names)})" if len(names) > 1 else "")
                + f", and {failing}",
                fix="lower the learning rate and start biases at zero; a leaky activation or normalisation before it keeps units alive",
                evidence={
                    "zero_share": self.shares[first],
                    "observed_steps": self.rows[first],
                    "dead_layers": ", ".join(names[:20]),
                    "first_loss": self.learning.first_level,
                    "recent_loss": self.learning.recent_level,
                },
            )
        ]

    def _cut_off(self) -> str:
        """No gradient at all comes past the layer, and that is how it stayed as far as anybody can tell."""
        if self.cut_in_a_row < PATIENCE:
            return ""
        learning = self.learning
        high = learning.readable and learning.recent_level > QUARTER * learning.first_level
        if not high and self.last_observed < LATE * self.last_step:
            return ""
        return "no gradient at all comes past it, so that nothing of the input can be learnt"


def _is_cut(step: Step, dead: int) -> bool:
    """Nothing before the dead layer gets any gradient, to the last bit: there is no way around the layer."""
    gradient = step.frames.get(Kind.ACTIVATION_GRADIENT)
    if gradient is None:
        return False
    before = (gradient.sites < dead) & (gradient["num"] > 0)
    return bool(before.any() and (gradient["l2"][before] == 0).all() and (gradient["nan"][before] == 0).all())


def _dead(step: Step) -> dict[int, float]:
    """Site -> share of zeros, of the layers whose ReLU is dead in this step."""
    output = step.frames[Kind.ACTIVATION]
    share = output["zeros"] / np.maximum(output["num"], 1)
    dead: dict[int, float] = {}
    below: list[int] = []  # layers whose outputs lie below zero: dead only if their gradient is cut, too
    columns = (share, *(output[name] for name in ("num", "mean", "std", "max")))
    for site, zeros, num, mean, std, highest in zip(output.sites.tolist(), *(column.tolist() for column in columns)):
        known = step.sites.get(site)
        if known is None or num <= 1:
            continue
        if known.type in RELU and zeros >= DEAD:
            dead[site] = zeros
        elif known.type in BEFORE_RELU and (highest <= 0 or mean + FAR_BELOW * std < 0):
            below.append(site)
    gradient = step.frames.get(Kind.ACTIVATION_GRADIENT)
    if gradient is None or not below:
        return dead
    cut = gradient["zeros"] / np.maximum(gradient["num"], 1)
    by_site = {site: c for site, c, num in zip(gradient.sites.tolist(), cut.tolist(), gradient["num"].tolist()) if num > 0}
    alive = [site for site, c in by_site.items() if c < DEAD]
    for site in below:
        # Everything before a dead layer has no gradient either; only where a later layer still has one is this the place of the cut.
        if by_site.get(site, 0.0) >= DEAD and any(other > site for other in alive):
            dead[site] = by_site[site]
    if any(step.sites[site].type in RELU for site in dead):
        return {site: c for site, c in dead.items() if step.sites[site].type in RELU}
    return dead
