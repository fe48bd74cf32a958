"""Who began it: the model, whose signal grows along its depth before any update, or the optimizer, whose updates are
larger than the weights?

Both end in the same way, so what counts is what was there first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sonde.events import Kind, Step
from sonde.rules.activity import count
from sonde.rules.depth import is_bias, profile
from sonde.rules.words import number

GROWTH = 1e3  # first layer over last, or last outputs over first: healthy models stay within a factor of twenty
UNEVEN = 100.0  # largest gradient of a bias over that of the last layer's: within ten in healthy recurrent models
THROWN = 0.5  # update over weights, whole model: healthy steps are 1e-4 to 1e-1


@dataclass(slots=True)
class Blowup:
    """A fold over the observed steps: the state of the signal before the first update, and the size of the updates."""

    judged: bool = False  # the first profile was taken
    grows_with_depth: bool = False
    both_ways: bool = False  # outputs forward and gradients backward: every update meets a chaotic surface
    step: int = -1
    where: str = ""
    sentence: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    thrown_step: int = -1  # first step whose update was THROWN times the weights
    largest_ratio: float = float("nan")
    first_ratio: float = float("nan")
    num_updates: int = 0

    def see(self, step: Step) -> None:
        if not self.judged and (Kind.ACTIVATION_GRADIENT in step.frames or Kind.GRADIENT in step.frames):
            self.judged = True
            # Only what was measured before the first update can be blamed on the model alone.
            if self.num_updates == 0:
                self._judge_depth(step)
        self.num_updates += count(step, "optimizer_steps")
        self._see_update(step)

    def _judge_depth(self, step: Step) -> None:
        seen = profile(step, over_time=True)
        if seen is not None and (seen.backward >= GROWTH or seen.forward >= GROWTH):
            self.grows_with_depth, self.step, self.where = True, step.number, seen.first
            if seen.backward >= seen.forward:
                what, times, than = f"the gradient at {seen.first} was", seen.backward, f"that at {seen.last}"
            else:
                what, times, than = f"the outputs near {seen.last} were", seen.forward, f"those of {seen.first}"
            self.sentence = f"before the first update {what} already {number(times)} times {than}"
            self.numbers = {"gradient_first_over_last": seen.backward, "output_last_over_first": seen.forward}
            self.both_ways = seen.backward >= GROWTH and seen.forward >= GROWTH
        if seen is None:
            self._judge_evenness(step)

    def _judge_evenness(self, step: Step) -> None:
        """Where the depth is inside one module (a recurrent layer), the gradients of the parameters tell it."""
        gradient = step.frames.get(Kind.GRADIENT)
        if gradient is None:
            return
        rows = [
            (site, norm)
            for site, norm, num in zip(gradient.sites.tolist(), gradient["l2"].tolist(), gradient["num"].tolist())
            if num > 0 and norm > 0 and site in step.sites
        ]
        # The gradient of a bias does not depend on the scale of what comes in, so it shows the signal alone.
        biases = sorted(row for row in rows if is_bias(step, row[0]))
        if len(biases) < 2:
            return
        site, norm = max(biases, key=lambda row: row[1])
        last = biases[-1][1]
        if norm >= UNEVEN * last:
            path = step.sites[site].path
            self.grows_with_depth, self.step, self.where = True, step.number, step.sites[site].module
            self.sentence = (
                f"before the first update the gradient of {path} was already {number(norm)}, "
                f"{number(norm / last)} times that of the last layer's bias"
            )
            self.numbers = {"gradient": norm, "gradient_of_last_layer": last}

    def _see_update(self, step: Step) -> None:
        update, parameter = step.frames.get(Kind.UPDATE), step.frames.get(Kind.PARAMETER)
        if update is None or parameter is None or not count(step, "optimizer_steps"):
            return
        with np.errstate(over="ignore"):
            size = float(np.sqrt(np.square(parameter["l2"]).sum()))
            change = float(np.sqrt(np.square(update["l2"]).sum()))
        if not size > 0:
            return
        ratio = change / size
        if self.first_ratio != self.first_ratio:
            self.first_ratio = ratio
        if not self.largest_ratio >= ratio:
            self.largest_ratio = ratio
        if ratio >= THROWN and self.thrown_step < 0:
            self.thrown_step = step.number

    @property
    def thrown(self) -> bool:
        return self.thrown_step >= 0

    def evidence(self) -> dict[str, Any]:
        return {"first_update_per_weight": self.first_ratio, "largest_update_per_weight": self.largest_ratio, **self.numbers}
