"""RunView: the facts of one attempt of one rank, as columns.

A view is an immutable snapshot. What several rules need is a property that is computed once. Nothing here judges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from sonde.events import (
    ANSWER_KINDS,
    Event,
    FatalSignalReceived,
    Frame,
    Kind,
    NonFinite,
    OriginFound,
    Site,
    SpikeDetected,
    Started,
    TypedEvent,
)
from sonde.formatting import layer_name
from sonde.run_view.call_counts import CallCounts
from sonde.run_view.dataloader_and_labels import InspectedBatches, LabelCounts, TrainingLoader
from sonde.run_view.epoch_length import Epochs
from sonde.run_view.layer_statistics_in_blocks import Block, Reduction, blocks, frame_positions
from sonde.run_view.learning_rate_schedule import LearningRateSchedule
from sonde.run_view.loss_trend import LossColumns, LossTrend
from sonde.run_view.source_lines_of_calls import CallLines
from sonde.run_view.step_columns import StepColumns
from sonde.run_view.step_times import StepTimes
from sonde.run_view.unseen_facts import LOSS, RECORDS, find_unseen
from sonde.runlog import record_format as f
from sonde.runlog.record_index import Ints, RecordIndex
from sonde.runlog.run_reader import Run, RunProcess

AnyEvent = TypeVar("AnyEvent", bound=TypedEvent)
State = TypeVar("State")
Fact = TypeVar("Fact")

_FROM_LOSS = frozenset({NonFinite, OriginFound, SpikeDetected})  # events that are missing where the loss is not read
MAX_EVENTS = 20_000  # of one kind that are held in memory: a real run has a few thousand, a malicious log millions


class RunView:
    """The facts of one process of a run: one rank, one attempt."""

    def __init__(self, process: RunProcess, storage: StepColumns | None = None) -> None:
        self.process = process
        self._storage = storage or StepColumns()
        self._index = RecordIndex(process.segments)
        self._storage.extend(self._index)
        self.rank = process.rank
        self.attempt = process.attempt
        self.sites: Mapping[int, Site] = dict(process.sites)
        self.steps = self._storage.table(self.sites)
        self.num_repeated_steps = self._storage.num_repeated
        self._events: dict[type[TypedEvent], tuple[Ints, tuple[TypedEvent, ...]]] = {}
        self._remembered: dict[Callable[[RunView], Any], Any] = {}
        self._reduced: dict[Reduction[Any], Any] = {}
        self._reads: set[str] = set()
        self._reads_of: dict[Callable[[RunView], Any], set[str]] = {}  # of the functions in `_remembered`

    def refresh(self) -> RunView:
        """A view of the process as it is now, after `Run.refresh`. Columns that are read already are shared."""
        return RunView(self.process, self._storage)

    def layer_name(self, path: str) -> str:
        """A layer in a sentence: one that is only a number with its class, `layer 4 (Linear)`; others by their path."""
        return layer_name(path, next((site.type for site in self.sites.values() if site.module == path), ""))

    # ---- what was not seen

    @cached_property
    def unseen(self) -> Mapping[str, str]:
        """What the run does not show although the training had it: a sentence by subject, which is `LOSS`, `RECORDS` or a kind of layer
        statistics."""
        return find_unseen(self)

    def missing_for(self, question: Callable[[RunView], Fact]) -> tuple[Fact, str]:
        """The answer to a question, and a sentence about what it reads and the run does not show; "" where it reads only what is there."""
        unseen = self.unseen
        answer, reads = self._with_reads(question)
        return answer, next((sentence for subject, sentence in unseen.items() if subject in reads or subject == RECORDS), "")

    def _with_reads(self, question: Callable[[RunView], Fact]) -> tuple[Fact, set[str]]:
        outer, self._reads = self._reads, set()
        try:
            return question(self), self._reads
        finally:
            outer |= self._reads
            self._reads = outer

    # ---- steps

    @property
    def num_steps(self) -> int:
        """Complete steps."""
        return len(self.steps)

    @property
    def step_numbers(self) -> Ints:
        return self.steps.numbers

    @property
    def last_step(self) -> int:
        """The number of the last complete step; -1 without any."""
        return int(self.step_numbers[-1]) if self.num_steps else -1

    def step_number(self, row: int) -> int:
        """The number of the step in this row of the columns; of events after the last complete step, the last number in the log."""
        if row < self.num_steps:
            return int(self.step_numbers[row])
        return max(self.last_step + 1, int(self._index.steps.max(initial=0)))

    def counts(self, name: str) -> Ints:
        """A scalar that counts calls, as integers; 0 where it was not recorded."""
        return self.steps.counts(name)

    @property
    def is_empty(self) -> bool:
        """Nothing can be said about the training: there is no complete step, and no event but that the run ended."""
        return not self.num_steps and not any(kind != "end" for kind in self.event_kinds) and self.process.fatal_signal is None

    @cached_property
    def elapsed_s(self) -> npt.NDArray[np.float64]:
        """Time of the training at the end of each step, without that of Sonde."""
        own = self.steps["step_ms"] - np.where(np.isnan(self.steps["sonde_ms"]), 0.0, self.steps["sonde_ms"])
        elapsed: npt.NDArray[np.float64] = np.cumsum(np.where(np.isfinite(own), np.maximum(own, 0.0), 0.0)) / 1e3
        return elapsed

    @property
    def total_s(self) -> float:
        return float(self.elapsed_s[-1]) if self.num_steps else 0.0

    # ---- events

    @property
    def event_kinds(self) -> list[str]:
        return self._index.kinds(f.EVENT)

    @property
    def are_layers_chosen(self) -> bool:
        """Whether the user chose the layers that were measured: nothing can then be said of all layers."""
        return any(event.layers for event in self.events(Started))

    @overload
    def events(self, event_type: type[AnyEvent], /) -> tuple[AnyEvent, ...]: ...

    @overload
    def events(self, event_type: type[TypedEvent], /, *more: type[TypedEvent]) -> tuple[TypedEvent, ...]: ...

    def events(self, event_type: type[TypedEvent], /, *more: type[TypedEvent]) -> tuple[TypedEvent, ...]:
        """The events of one or several types in the order of the log."""
        if not more:
            return self._located(event_type)[1]
        return tuple(event for _, event in self.events_with_rows(event_type, *more))

    def events_with_rows(self, *types: type[AnyEvent]) -> list[tuple[int, AnyEvent]]:
        """The events of these types with the row of the step in which each happened; by row, then by position in the log.

        An event after the last complete step has the row `num_steps`. The answer of a search belongs to the step that was searched.
        """
        found: list[tuple[int, int, Any]] = []
        for event_type in types:
            positions, events = self._located(event_type)
            rows = self._rows_of(event_type.KIND, positions, events)
            found += zip(positions.tolist(), rows.tolist(), events)
        found.sort(key=lambda each: (each[1], each[0]))
        return [(row, event) for _, row, event in found]

    def each_event(self, event_type: type[AnyEvent]) -> Iterator[tuple[int, AnyEvent]]:
        """As `events_with_rows` for a type with one event per step: they are not held in memory, and there is no limit."""
        for position, event in self._index.records(self._index.positions(f.EVENT, event_type.KIND)):
            if isinstance(event, Event) and isinstance(typed := event.typed, event_type):
                yield int(self._rows_of(event.kind, np.array([position]), (typed,))[0]), typed

    def _located(self, event_type: type[TypedEvent]) -> tuple[Ints, tuple[Any, ...]]:
        if event_type in _FROM_LOSS:
            self._reads.add(LOSS)
        if event_type not in self._events:
            found = []
            positions = self._index.positions(f.EVENT, event_type.KIND)[:MAX_EVENTS]
            for position, event in self._index.records(positions):
                if isinstance(event, Event) and isinstance(typed := event.typed, event_type):
                    found.append((position, typed))
            fatal = self.process.fatal_signal if event_type is FatalSignalReceived else None
            if fatal is not None and isinstance(typed := fatal.typed, event_type):
                found.append((len(self._index), typed))
            located = np.array([position for position, _ in found], np.int64), tuple(event for _, event in found)
            self._events[event_type] = located
        return self._events[event_type]

    def _rows_of(self, kind: str, positions: Ints, events: Sequence[TypedEvent]) -> Ints:
        """The rows of the steps in which events happened: the first step with at least their number that is completed after them."""
        rows = np.searchsorted(self.step_numbers, np.array([event.step for event in events], np.int64))
        if kind in ANSWER_KINDS:
            return rows
        return np.maximum(rows, np.searchsorted(self.steps.positions, positions))

    # ---- layers

    @property
    def layer_kinds(self) -> list[str]:
        """The kinds of frames: of layers, parameters, batches and logged numbers."""
        return [kind for kind in self._index.kinds(f.FRAME) if kind != Kind.STEP]

    def observed_rows(self, kind: str) -> Ints:
        """The rows of the steps that have a frame of this kind."""
        return np.flatnonzero(frame_positions(self._index, (kind,), self.steps)[:, 0] >= 0)

    def blocks(self, *kinds: str, rows: Ints | None = None) -> Iterator[Block]:
        """The statistics of these kinds, block by block (`layer_statistics_in_blocks`). With `rows`, those of these steps only."""
        self._reads.update(kinds)
        return blocks(self._index, kinds, self.steps, self.sites, rows)

    def reduced(self, reduction: Reduction[State]) -> State:
        """The state of a reduction after all blocks. An error of its function is raised again at each call."""
        self._reads.update(reduction.kinds)
        if reduction not in self._reduced:
            self.reduce_together([reduction])
        state = self._reduced[reduction]
        if isinstance(state, Exception):
            raise state
        result: State = state
        return result

    def reduce_together(self, reductions: Sequence[Reduction[Any]]) -> None:
        """Compute several reductions with one pass over the layers and one over the batches."""
        pending = [each for each in dict.fromkeys(reductions) if each not in self._reduced]
        # Batches are inspected in other steps than layers: together they would cut each other's blocks into small pieces.
        for has_batches in (False, True):
            self._reduce_in_one_pass([each for each in pending if (Kind.BATCH in each.kinds) == has_batches])

    def _reduce_in_one_pass(self, reductions: Sequence[Reduction[Any]]) -> None:
        states: dict[Reduction[Any], Any] = {each: each.initial() for each in reductions}
        kinds = dict.fromkeys(kind for each in reductions for kind in each.kinds)
        for block in self.blocks(*kinds) if kinds else ():
            for each in reductions:
                if isinstance(states[each], Exception) or not any(kind in block for kind in each.kinds):
                    continue
                try:
                    states[each] = each.reduce(block, states[each])
                except Exception as error:  # of one rule: the others still get their states
                    states[each] = error
        self._reduced |= states

    # ---- facts that several readers need

    def remember(self, function: Callable[[RunView], Fact]) -> Fact:
        """`function(view)`, computed at the first call."""
        if function not in self._remembered:
            self._remembered[function], self._reads_of[function] = self._with_reads(function)
        self._reads |= self._reads_of[function]
        fact: Fact = self._remembered[function]
        return fact

    @cached_property
    def calls(self) -> CallCounts:
        return CallCounts.of(self)

    @cached_property
    def call_sites(self) -> CallLines:
        return CallLines.of(self)

    @property
    def losses(self) -> LossColumns:
        return self.remember(LossColumns.of)

    def loss_series(self, name: str) -> tuple[Ints, npt.NDArray[np.float64]]:
        """Steps and values of one loss, where it was computed. A NaN is a loss only if an event says so."""
        values = self.steps[name]
        nonfinite = [event.step for event in self.events(NonFinite) if event.what == "loss" and (event.where or "loss") == name]
        is_there = ~np.isnan(values) | np.isin(self.step_numbers, nonfinite)
        return self.step_numbers[is_there], values[is_there]

    @property
    def loss_trend(self) -> LossTrend:
        return self.remember(LossTrend.of)

    @cached_property
    def epochs(self) -> Epochs:
        return Epochs.of(self)

    @cached_property
    def schedule(self) -> LearningRateSchedule:
        reads = set(self._reads)  # the losses that it looks at say only whether a low rate still helps
        schedule = LearningRateSchedule.of(self)
        self._reads = reads
        return schedule

    @cached_property
    def times(self) -> StepTimes:
        return StepTimes.of(self)

    @cached_property
    def training_loader(self) -> TrainingLoader:
        return TrainingLoader.of(self)

    @cached_property
    def inspected_batches(self) -> InspectedBatches:
        return InspectedBatches.of(self)

    @cached_property
    def labels(self) -> LabelCounts:
        return LabelCounts.of(self.inspected_batches.labels)

    def logged(self, name: str) -> tuple[Ints, npt.NDArray[np.float64]]:
        """Steps and values of a number that the user passed to `session.log`."""
        wanted = [site.id for site in self.sites.values() if site.path == name]
        steps, values = [], []
        for _, frame in self._index.records(self._index.positions(f.FRAME, Kind.LOG)):
            if isinstance(frame, Frame) and (columns := np.flatnonzero(np.isin(frame.sites, wanted))).size:
                steps.append(frame.step)
                values.append(float(frame["value"][columns[0]]))
        return np.array(steps, np.int64), np.array(values, np.float64)


def newest_views(run: Run) -> dict[int, RunView]:
    """By rank the view that is judged: the newest attempt with a complete step, or one that a signal killed before its first step."""
    chosen: dict[int, RunProcess] = {}
    for process in run.processes:  # by attempt
        if process.last_step >= 0 or process.fatal_signal is not None or process.rank not in chosen:
            chosen[process.rank] = process
    return {rank: RunView(chosen[rank]) for rank in sorted(chosen)}


def trained_view(run: Run, rank: int) -> RunView | None:
    """The newest attempt of a rank that completed a step."""
    trained = [process for process in run.processes if process.rank == rank and process.last_step >= 0]
    return RunView(trained[-1]) if trained else None
