"""Gradients from the last update are still there when the next backward adds to them.

What it finds    optimizer.zero_grad() (or an equivalent) is never called between updates.
Why it matters   every update then follows the sum of all past gradients: with SGD the loss blows up, with Adam it
                 merely learns worse.
How it knows     a backward adds to gradients that an optimizer step has used already and that nobody cleared since:
                 an exact relation, taken at the calls themselves.
Known problems   accumulation on purpose (K06) also enters backward with gradients, but without an update in between:
                 that tells them apart. Setting `p.grad = None` by hand clears as well as zero_grad() does. Gradients
                 of a frozen or unused part stay None and tell nothing. Clearing only every few updates is reported
                 too, since the updates in between use old gradients. Each optimizer is asked about its own gradients,
                 so several of them (K04, K19) do not confuse it.
Fix              call optimizer.zero_grad() before each backward that starts a new update.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.activity import Activity, count
from sonde.rules.learning import Learning
from sonde.rules.origins import BAD_NUMBERS
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.source import Sources
from sonde.rules.words import number

PATIENCE = 3  # updates in a row: a resumed run may start with one stale gradient


@dataclass(slots=True)
class MissingZeroGrad:
    name: ClassVar[str] = "missing-zero-grad"
    explains: ClassVar[tuple[str, ...]] = (
        "lr-divergence", "exploding-gradient", *BAD_NUMBERS, "dead-relu", "vanishing-gradient", "loss-plateau", "unchanged-parameter",
    )  # fmt: skip

    activity: Activity = field(default_factory=Activity)
    learning: Learning = field(default_factory=Learning)
    sources: Sources = field(default_factory=Sources)
    by_optimizer: dict[object, Sources] = field(default_factory=dict)
    stale_optimizer: object = None
    in_a_row: int = 0
    row_step: int = -1  # where the present row began
    step: int = -1  # where the first row that was long enough began
    first_norm: float = float("nan")
    largest_norm: float = float("nan")

    def see(self, step: Step) -> None:
        self.activity.see(step)
        self.learning.see(step)
        self._see_sources(step)
        norm = step.scalar("grad_norm")
        if self.first_norm != self.first_norm:
            self.first_norm = norm
        if not self.largest_norm >= norm:
            self.largest_norm = norm if norm == norm else self.largest_norm
        if count(step, "stale_updates"):
            if not self.in_a_row:
                self.row_step = step.number
            self.in_a_row += count(step, "stale_updates")
            if self.in_a_row >= PATIENCE and self.step < 0:
                self.step = self.row_step
        elif count(step, "optimizer_steps"):
            self.in_a_row = 0

    def _see_sources(self, step: Step) -> None:
        """Of several optimizers, the lines of the one whose gradients are stale are the ones to show."""
        for event in step.events:
            if event.kind == "stale_update" and self.stale_optimizer is None:
                self.stale_optimizer = event.data.get("optimizer")
                if len(self.sources.lines.get("optimizer_step", ())) > 1:
                    self.sources = self.by_optimizer.get(self.stale_optimizer, self.sources)
            elif event.kind == "source" and event.data.get("call") == "optimizer_step":
                own = self.by_optimizer.setdefault(event.data.get("optimizer"), Sources())
                own.see(replace(step, events=(event,)))
        if self.stale_optimizer is None:
            self.sources.see(step)

    def answer(self) -> Answer:
        updates = self.activity.totals["optimizer_steps"]
        if self.step < 0:
            if updates <= PATIENCE:
                return NotEvaluated(f"only {updates} optimizer steps were taken" if updates else "no optimizer stepped")
            return Clear()
        stale, cleared = self.activity.totals["stale_updates"], self.activity.totals["zero_grads"]
        called = f"zero_grad() was called {cleared} times, but not between these" if cleared else "zero_grad() was never called"
        return [
            Finding(
                rule=self.name,
                severity=Severity.CRITICAL if self.learning.failing else Severity.ERROR,
                where="",
                step=self.step,
                cause=f"{stale} of {updates} optimizer steps{self.sources.at('optimizer_step')} used gradients that still held "
                f"those of the update before; {called}; "
                f"the gradient norm went from {number(self.first_norm)} up to {number(self.largest_norm)}",
                fix="call optimizer.zero_grad() before each backward that starts a new update",
                evidence={
                    "stale_updates": stale,
                    "optimizer_steps": updates,
                    "zero_grads": cleared,
                    "first_grad_norm": self.first_norm,
                    "largest_grad_norm": self.largest_norm,
                    **self.sources.evidence("optimizer_step"),
                },
            )
        ]
