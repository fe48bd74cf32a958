"""What a run knows about its data: the DataLoader that feeds the training, and the labels of the batches that were inspected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sonde.events import BatchInspected, CallSiteFound, DataPass, Event
from sonde.run_view.source_lines_of_calls import source_evidence
from sonde.runlog.record_index import Ints

if TYPE_CHECKING:
    from sonde.run_view.run_view import RunView

Bools = npt.NDArray[np.bool_]

MOST = 0.5  # of the inspected steps that fetched a batch: below, training batches do not come from a DataLoader
MAX_LABELS = 4096  # different ones that are counted
MAX_INTEGER = 1 << 53  # a larger number comes from a damaged log


@dataclass(frozen=True, slots=True)
class TrainingLoader:
    """The DataLoader that feeds the training; others may serve a validation, or compute the mean of the data."""

    site: CallSiteFound | None = None  # the line that starts its passes, and its settings
    num_batches: int = 0  # in one pass; 0 if that is not known
    num_workers: int = 0
    batch_size: int = 0
    order: str = ""  # `random`, `sequential`, `stream` or `other`; empty if it is not known

    @classmethod
    def of(cls, view: RunView) -> TrainingLoader:
        passes = view.events_with_rows(DataPass)
        described = {event.loader: event.description for _, event in passes if event.description is not None}
        if described:
            description = described.get(_feeding_loader(view, [(row, event.loader) for row, event in passes]))
            loader = None if description is None else Event(CallSiteFound.KIND, 0, description).typed
        else:
            loader = _last_before_training(view)
        if not isinstance(loader, CallSiteFound):
            return cls()
        num_batches, num_workers, batch_size = (_integer(num) for num in (loader.num_batches, loader.num_workers, loader.batch_size))
        return cls(loader, num_batches, num_workers, batch_size, loader.order or "")

    @property
    def at(self) -> str:
        """` at train.py:41`, or nothing: for the end of a sentence."""
        return f" at {self.site.line}" if self.site and self.site.line else ""

    def evidence(self) -> dict[str, float | str]:
        return source_evidence(self.site.line, self.site.text) if self.site else {}


def _last_before_training(view: RunView) -> CallSiteFound | None:
    """In runs of earlier versions: the last loader that was started before the model was trained."""
    loader: CallSiteFound | None = None
    has_trained = False
    for site in view.events(CallSiteFound):
        if site.call == "loader" and not (loader and has_trained):
            loader = site
        elif site.call == "forward":
            has_trained = True
    return loader


def _feeding_loader(view: RunView, passes: Sequence[tuple[int, int]]) -> int:
    """The index of the loader from which most training steps have their batch; -1 if batches do not come from a loader. `passes`: the row
    of the step in which each pass began, and the loader."""
    inspected = view.inspected_batches.num_fetched
    if len(inspected) and np.count_nonzero(inspected) < MOST * len(inspected):
        return -1
    starts = {row: loader for row, loader in passes if row < view.num_steps}  # of several in one step, the last
    num_in_row, has_evaluation = Counter(row for row, _ in passes), view.counts("eval_forwards") > 0
    # A pass that begins alone in a step with an evaluation is that of the evaluation.
    training_starts = {row: loader for row, loader in starts.items() if num_in_row[row] > 1 or not has_evaluation[row]} or starts
    rows = sorted(training_starts)
    last_start = np.searchsorted(rows, np.flatnonzero(view.counts("backwards") > 0), side="right") - 1
    num_steps = Counter(training_starts[rows[index]] for index in last_start.tolist() if index >= 0)
    return num_steps.most_common(1)[0][0] if num_steps else -1


@dataclass(frozen=True, slots=True)
class BatchLabels:
    """The labels of inspected batches, as columns with one entry per batch whose labels are known."""

    rows: Ints  # of the steps
    num: Ints
    num_classes: Ints  # columns of the model's output
    num_distinct: Ints
    is_in_order: Bools
    is_per_sample: Bools  # one label for each sample of the batch
    is_learned: Bools  # the scores are made by weights in training, not by comparing samples
    counts: Sequence[Ints]  # of each batch an array (labels x 2): label, number of times

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, condition: Bools) -> BatchLabels:
        """The batches for which a condition holds."""
        columns = {each.name: getattr(self, each.name)[condition] for each in fields(self) if each.name != "counts"}
        return BatchLabels(**columns, counts=list(compress(self.counts, condition.tolist())))


@dataclass(frozen=True, slots=True)
class InspectedBatches:
    """The batches whose samples were compared with each other, as columns with one entry per batch."""

    rows: Ints  # of the steps
    num_fetched: Ints  # batches that DataLoaders return in this step before the model runs
    num_inputs: Ints  # input tensors that can distinguish samples
    num_alike: Ints  # those of them in which all samples are equal
    size: Ints
    sample: Ints  # hash of one of the equal samples, of 52 bits; 0 if they differ
    labels: BatchLabels

    @classmethod
    def of(cls, view: RunView) -> InspectedBatches:
        rows, label_rows, counts = [], [], []
        for row, event in view.each_event(BatchInspected):
            numbers = (event.num_fetched, event.num_inputs, event.num_alike, event.size, event.sample)
            rows.append((row, *map(_integer, numbers)))
            labels = event.labels or {}
            num, num_classes, num_distinct = (_integer(labels.get(name)) for name in ("num", "num_classes", "num_distinct"))
            times = _label_counts(labels.get("counts"))
            if num and len(times):
                is_in_order, is_learned = bool(labels.get("in_order")), bool(labels.get("is_learnt", True))
                label_rows.append((row, num, num_classes, num_distinct, is_in_order, num == event.size, is_learned))
                counts.append(times)
        steps, num_fetched, num_inputs, num_alike, size, sample = _columns(rows, 6)
        at, nums, classes, distinct, in_order, per_sample, learned = _columns(label_rows, 7)
        found = BatchLabels(at, nums, classes, distinct, in_order > 0, per_sample > 0, learned > 0, counts)
        return cls(steps, num_fetched, num_inputs, num_alike, size, sample, found)


@dataclass(frozen=True, slots=True)
class LabelCounts:
    """How often each label was seen in the batches that were inspected."""

    totals: Counter[int] = field(default_factory=Counter)
    num_batches: int = 0
    num_classes: int = 0

    @classmethod
    def of(cls, labels: BatchLabels) -> LabelCounts:
        if not len(labels):
            return cls()
        pairs = np.concatenate(labels.counts)
        values, first, positions = np.unique(pairs[:, 0], return_index=True, return_inverse=True)
        times = np.bincount(positions, weights=pairs[:, 1])
        chosen = np.argsort(first)[:MAX_LABELS]
        totals = Counter({int(value): int(num) for value, num in zip(values[chosen], times[chosen])})
        return cls(totals, len(labels), int(labels.num_classes.max()))

    def shares(self) -> list[float]:
        """Of each label among all."""
        total = self.totals.total()
        return [times / total for times in self.totals.values()]


def _columns(rows: Sequence[tuple[int, ...]], num: int) -> list[Ints]:
    return list(np.array(rows, np.int64).reshape(-1, num).T)


def _label_counts(pairs: object) -> Ints:
    pairs = pairs if isinstance(pairs, list) else []
    found = [[_integer(each) for each in pair] for pair in pairs if isinstance(pair, list) and len(pair) == 2]
    return np.array(found, np.int64).reshape(-1, 2)


def _integer(value: object) -> int:
    return int(value) if isinstance(value, (int, float)) and abs(value) < MAX_INTEGER else 0
