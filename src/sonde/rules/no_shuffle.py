"""The training data come in the order of their labels.

What it finds    sorted data that are not shuffled: batches in a row hold one class, or two where classes meet.
Why it matters   each stretch pulls the whole model towards one class and away from what it learnt of the others: the loss
                 saws up and down, batch norm sees one class at a time, and the result is worse than it could be.
How it knows     the labels of the batches that were looked at: each in order, and with far fewer different ones than
                 a batch of that size would have, drawn at random from all labels that were seen; batches in a row go on
                 with the same label or the next; and the same labels come back in the next epoch, or the DataLoader
                 says that it does not shuffle.
Known problems   a curriculum (K46) is sorted by something else than the label. Tasks that are learnt one after another (K93) do not
                 come back and are shuffled within; samplers that put one or a few classes into each batch jump from one
                 to another. What is sorted by time and has labels that last looks the same, and mostly is.
Fix              DataLoader(..., shuffle=True), or a permutation of the samples at the start of each epoch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.batches import Balance, Loader, labels_of
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.source import Sources
from sonde.rules.words import number

ENOUGH = 8  # batches that were looked at
FEWEST = 4  # labels in a batch: fewer are in order by chance
IN_ORDER = 0.9  # of the batches; the last of an epoch and the first of the next may be one
FEW = 0.5  # of the different labels beyond the first that chance would give: shuffled batches have 0.9 to 1.1
SEVERAL = 1.5  # different labels by chance: where nearly all are of one class, single batches have no other, shuffled or not
GOES_ON = 0.8  # of the batches in a row have the same label or (of more than two) the next; some meet where the last epoch ends


@dataclass(slots=True)
class NoShuffle:
    name: ClassVar[str] = "no-shuffle"
    explains: ClassVar[tuple[str, ...]] = ("loss-plateau", "loss-spike", "gradient-spike")

    sources: Sources = field(default_factory=Sources)
    loader: Loader = field(default_factory=Loader)
    balance: Balance = field(default_factory=Balance)
    sizes: Counter[int] = field(default_factory=Counter)
    num: int = 0
    num_in_order: int = 0
    num_distinct: int = 0  # summed over the batches
    first_step: int = -1
    present: frozenset[int] = frozenset()  # labels of the last batch
    gone: set[int] = field(default_factory=set)  # labels that were there, and then were not
    num_returns: int = 0
    last_step: int = -1
    num_adjacent: int = 0  # looked at in two steps in a row
    num_touching: int = 0  # of these, where the second goes on with the labels of the first
    num_next: int = 0  # or with the next label

    def see(self, step: Step) -> None:
        self.sources.see(step)
        self.loader.see(step)
        labels = labels_of(step)
        if labels is None or labels.num < FEWEST or labels.num_classes < 2 or not labels.per_sample:
            return
        self.first_step = step.number if not self.num else self.first_step
        self.num += 1
        self.num_in_order += labels.in_order
        self.num_distinct += labels.num_distinct
        self.sizes[labels.num] += 1
        now = frozenset(value for value, _ in labels.counts)
        self.num_returns += bool(now & self.gone)
        self.gone = (self.gone | self.present) - now
        before, self.present = self.present, now
        self.balance.add(labels)
        if step.number == self.last_step + 1 and self.num > 1:
            self.num_adjacent += 1
            self.num_touching += bool(now & before)
            self.num_next += min(now) - max(before) == 1 or min(before) - max(now) == 1
        self.last_step = step.number

    def answer(self) -> Answer:
        if not self.num:
            return NotEvaluated("no class labels were seen: no observed step ended in a cross entropy of a model's output")
        if self.loader.order == "random" or self.num_in_order < IN_ORDER * self.num:
            return Clear()
        if self.num < ENOUGH:
            return NotEvaluated(f"only {self.num} batches with labels were looked at")
        if len(self.balance.totals) < 2:
            return NotEvaluated("all labels that were seen are one class")
        expected = self._expected()
        distinct = self.num_distinct / self.num
        # Of two classes one is always next to the other: a discriminator gets real samples in one step and made ones in the next.
        going_on = self.num_touching + (self.num_next if len(self.balance.totals) > 2 else 0)
        if expected < SEVERAL or distinct - 1 > FEW * (expected - 1) or going_on < GOES_ON * self.num_adjacent:
            return Clear()
        if not self.num_returns and self.loader.order != "sequential":
            return NotEvaluated("the labels come in order, but none of them has come back yet")
        how = "does not shuffle" if self.loader.order == "sequential" else "feeds them"
        return [
            Finding(
                rule=self.name,
                severity=Severity.WARNING,
                where="",
                step=self.first_step,
                cause=f"the labels come sorted: a batch of {self._size} has {number(distinct)} class{'es' * (distinct != 1)}, where chance "
                f"gives {number(expected)}, and {self.num_in_order} of {self.num} batches are in order"
                + (f"; the DataLoader{self.loader.at} {how}" if self.loader.facts else self.sources.at("forward")),
                fix="shuffle the training data: DataLoader(..., shuffle=True), or a new permutation in each epoch",
                evidence={
                    "num_looked_at": self.num, "in_order": self.num_in_order, "distinct": distinct, "distinct_by_chance": expected,
                    "num_labels_seen": len(self.balance.totals), **(self.loader.evidence() or self.sources.evidence("forward")),
                },
            )
        ]  # fmt: skip

    @property
    def _size(self) -> int:
        return self.sizes.most_common(1)[0][0]

    def _expected(self) -> float:
        """How many different labels a batch would have that is drawn from all that were seen."""
        return sum(1 - (1 - share) ** self._size for share in self.balance.shares())
