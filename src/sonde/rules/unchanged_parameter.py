"""A parameter gets gradients, an optimizer steps, and the parameter never changes.

What it finds    parameters that look trained and are not: restored after each step, a group that does nothing,
                 updates lost to the precision.
Why it matters   that part of the model stays as it was, and nothing complains.
How it knows     at every observed update the gradient was non-zero and finite and the learning rate above zero, and
                 yet the change was exactly zero; or the parameter changed in each step and was back at the same
                 values, to the last bit of all its statistics, at the next.
Known problems   a frozen part (K02) has no gradients. Zero-initialised branches and adapters (K14, K30) have zero
                 gradients first and change later. Steps that a GradScaler skipped (K09), micro-batches without an
                 update (K06) and steps with a rate of 0 (K05, K33) are not counted. A gradient so small that the step
                 would round away (K25) is not counted either. Parameters of another optimizer that steps less often
                 do change sometimes. Parameters that no optimizer holds are params-not-in-optimizer.
Fix              find what writes the parameter back, or holds it out of its optimizer's step; train in float32 if the
                 updates round to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from sonde.events import Finding, Frame, Kind, Severity, Site, Step
from sonde.rules.activity import count
from sonde.rules.learning import Learning
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.source import Sources
from sonde.rules.words import listing, modules_of

PATIENCE = 3  # observed updates of the parameter's own optimizer, all of them: a single zero may be rounding
VISIBLE = 1e-5  # of the largest weight: what an update must reach to show in float32 with some room
STATISTICS = ("mean", "std", "min", "max", "l2")  # equal in all five to the last bit: the same values


@dataclass(slots=True)
class UpdateHistory:
    """What one parameter did at the observed updates."""

    first_step: int
    statistics: tuple[float, ...]
    num_still: int = 0  # gradient, learning rate, no change
    num_restored: int = 0  # changed by the update, but as before at the next
    changed: bool = False


@dataclass(slots=True)
class UnchangedParameter:
    name: ClassVar[str] = "unchanged-parameter"
    explains: ClassVar[tuple[str, ...]] = ("loss-plateau", "dead-relu", "vanishing-gradient")

    learning: Learning = field(default_factory=Learning)
    sources: Sources = field(default_factory=Sources)
    watches: dict[int, UpdateHistory] = field(default_factory=dict)
    unowned: set[str] = field(default_factory=set)
    sites: Mapping[int, Site] = field(default_factory=dict)
    num_observed: int = 0

    def see(self, step: Step) -> None:
        self.learning.see(step)
        self.sources.see(step)
        for event in step.events:
            if event.kind == "membership":
                self.unowned = set(event.data.get("unowned", ()))
        frames = [step.frames.get(kind) for kind in (Kind.PARAMETER, Kind.GRADIENT, Kind.UPDATE)]
        lr = step.scalar("lr")
        stepped = count(step, "optimizer_steps") and not count(step, "skipped_steps") and not count(step, "empty_updates")
        if not stepped or not lr > 0:
            return
        parameter, gradient, update = frames
        if parameter is None or gradient is None or update is None:
            return
        self.sites = step.sites
        self.num_observed += 1
        self._compare(step.number, lr, parameter, gradient, update)

    def _compare(self, number: int, lr: float, parameter: Frame, gradient: Frame, update: Frame) -> None:
        before = dict(zip(parameter.sites.tolist(), np.stack([parameter[name] for name in STATISTICS], axis=1).tolist()))
        # SGD moves by lr times the gradient, Adam by about lr: the smaller of the two is what can be relied on.
        reach = np.minimum(np.maximum(np.abs(gradient["min"]), np.abs(gradient["max"])), 1.0) * lr
        finite = (gradient["l2"] > 0) & (gradient["nan"] == 0) & (gradient["inf"] == 0)
        pull = dict(zip(gradient.sites.tolist(), np.where(finite, reach, 0.0).tolist()))
        still = (update["num"] > 0) & (update["l2"] == 0) & (update["nan"] == 0) & (update["inf"] == 0)
        for site, unmoved in zip(update.sites.tolist(), still.tolist()):
            statistics = before.get(site)
            if statistics is None:
                continue
            watch = self.watches.get(site)
            if watch is None:
                watch = self.watches[site] = UpdateHistory(number, tuple(statistics))
            elif tuple(statistics) != watch.statistics:
                watch.changed = True
                continue
            largest = max(abs(statistics[2]), abs(statistics[3]))
            if pull.get(site, 0.0) <= VISIBLE * largest:
                continue
            watch.num_still += unmoved
            watch.num_restored += not unmoved

    def answer(self) -> Answer:
        if self.num_observed < PATIENCE:
            return NotEvaluated(f"only {self.num_observed} updates with gradients were observed")
        findings = []
        for restored in (False, True):
            stuck = [
                (self.sites[site], watch)
                for site, watch in sorted(self.watches.items())
                if not watch.changed
                and (watch.num_restored if restored else watch.num_still) >= PATIENCE
                and (restored or not watch.num_restored)
                and not self._is_unowned(self.sites[site])
            ]
            # A loss that fell although nothing moves is a contradiction: an optimizer that acts on every k-th call, say.
            if stuck and not (self.learning.fallen and len(stuck) == len(self.watches)):
                findings.append(self._finding(stuck, restored))
        return findings or Clear()

    def _is_unowned(self, site: Site) -> bool:
        return site.path in self.unowned or f"{site.model}.{site.path}" in self.unowned

    def _finding(self, stuck: list[tuple[Site, UpdateHistory]], restored: bool) -> Finding:
        everything = [s.path for s in self.sites.values() if s.kind == "parameter" and s.trainable and s.model == stuck[0][0].model]
        paths = [site.path for site, _ in stuck]
        places = modules_of(paths, everything)
        first = stuck[0][1]
        how = (
            f"changed in {first.num_restored} observed updates and each time were back at the same values before the next"
            if restored
            else f"got non-zero gradients in {first.num_still} observed updates, and each time did not change at all"
        )
        return Finding(
            rule=self.name,
            severity=Severity.CRITICAL if len(paths) >= len(everything) else Severity.ERROR,
            where=places[0] if len(places) == 1 or len(paths) < len(everything) else "",
            step=min(watch.first_step for _, watch in stuck),
            cause=f"{len(paths)} of {len(everything)} trainable parameters ({listing(places)}) {how}{self.sources.at('optimizer_step')}",
            fix="find what writes the old values back after the step"
            if restored
            else "check the parameter group's learning rate and precision, and that its own optimizer is stepped",
            evidence={
                "num_unchanged": len(paths),
                "num_trainable": len(everything),
                "observed_updates": self.num_observed,
                "modules": ", ".join(places[:20]),
                "restored": "yes" if restored else "no",
                **self.sources.evidence("optimizer_step"),
            },
        )
