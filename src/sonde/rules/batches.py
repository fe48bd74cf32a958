"""What a run knows of its data: the DataLoader that feeds the training, the batches that were looked at, and their labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sonde.events import Kind, Step
from sonde.rules.activity import count
from sonde.rules.rule import NotEvaluated
from sonde.rules.words import amount

ADJACENT = 2  # pairs of steps in a row, both looked at: batches that come again once in an epoch would meet in any other
MAX_LABELS = 4096  # different ones that are counted
NOTHING_SEEN = NotEvaluated("no batch was looked at: no observed step ran a watched model")


@dataclass(slots=True)
class Loader:
    """The last DataLoader that was started before the model trained on something: before it there may be one for a validation, or one for
    the mean of the data."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    has_trained: bool = False

    def see(self, step: Step) -> None:
        for event in step.events:
            call = event.data.get("call") if event.kind == "source" else ""
            if call == "loader" and not (self.facts and self.has_trained):
                self.facts = event.data
            elif call == "forward":
                self.has_trained = True

    @property
    def num_batches(self) -> int:
        """In one pass; 0 where that is not known."""
        return int(amount(self.facts, "num_batches"))

    @property
    def num_workers(self) -> int:
        return int(amount(self.facts, "num_workers"))

    @property
    def batch_size(self) -> int:
        return int(amount(self.facts, "batch_size"))

    @property
    def order(self) -> str:
        """`random`, `sequential`, `stream` or `other`; empty where it is not known."""
        return str(self.facts.get("order", ""))

    @property
    def at(self) -> str:
        """` at train.py:41`, or nothing: for the end of a sentence."""
        line = str(self.facts.get("line", ""))
        return f" at {line}" if line else ""

    def evidence(self) -> dict[str, float | str]:
        line, text = str(self.facts.get("line", "")), str(self.facts.get("text", ""))
        return {name: value for name, value in (("source", line), ("source_text", text)) if value}


@dataclass(slots=True)
class Repeats:
    """Batches of a DataLoader by their content: do they come again?"""

    first: tuple[float, ...] = ()
    first_step: int = -1
    last: tuple[float, ...] = ()
    last_step: int = -1
    num: int = 0
    num_like_first: int = 0
    num_adjacent: int = 0  # looked at in two steps in a row
    num_alike: int = 0  # of these, with the same content in both
    size: int = 0

    def see(self, step: Step) -> None:
        if count(step, "backwards") > 1 or amount(data_of(step), "num_fetched") != 1:
            return  # one of several batches of this step, of several loaders perhaps: an epoch may begin with every step
        rows = [(site, row) for site, row in step.table(Kind.BATCH) if site.path.startswith("batch.")] if Kind.BATCH in step.frames else []
        content = tuple(row.get("hash", float("nan")) for _, row in rows)
        if not content or any(part != part for part in content):
            return
        if not self.num:
            self.first, self.first_step = content, step.number
            self.size = int(rows[0][1].get("size", 0))
        self.num += 1
        self.num_like_first += content == self.first
        if step.number == self.last_step + 1 and self.num > 1:
            self.num_adjacent += 1
            self.num_alike += content == self.last
        self.last, self.last_step = content, step.number


class Labels(NamedTuple):
    """Those of one batch."""

    num: int
    num_classes: int  # columns of what the model puts out
    num_distinct: int
    counts: tuple[tuple[int, int], ...]
    in_order: bool
    per_sample: bool  # one for each sample of the batch
    is_learnt: bool  # the columns that they choose from are weights in training, not other samples


def data_of(step: Step) -> Mapping[str, Any]:
    """What was noted of this step's batch; empty where it was not looked at."""
    return next((event.data for event in step.events if event.kind == "data"), {})


def labels_of(step: Step) -> Labels | None:
    data = data_of(step)
    given = data.get("labels")
    if not isinstance(given, Mapping):
        return None
    pairs = given.get("counts")
    counts = tuple((int(pair[0]), int(pair[1])) for pair in pairs if len(pair) == 2) if isinstance(pairs, list) else ()
    num = int(amount(given, "num"))
    if not counts or not num:
        return None
    return Labels(
        num, int(amount(given, "num_classes")), int(amount(given, "num_distinct")), counts, bool(given.get("in_order")),
        num == int(amount(data, "size")), bool(given.get("is_learnt", True)),
    )  # fmt: skip


@dataclass(slots=True)
class Balance:
    """How often each label was seen."""

    totals: Counter[int] = field(default_factory=Counter)
    num_batches: int = 0
    num_classes: int = 0

    def add(self, labels: Labels) -> None:
        self.num_batches += 1
        self.num_classes = max(self.num_classes, labels.num_classes)
        for value, times in labels.counts:
            if value in self.totals or len(self.totals) < MAX_LABELS:
                self.totals[value] += times

    def shares(self) -> list[float]:
        total = self.totals.total()
        return [times / total for times in self.totals.values()]
