"""Recording steps of one kind or another. It is told when a step and its phases begin and end, by who drives the model or by who listens
to a script, and keeps what the tapes say.

A *bare* step has doors at the outermost modules alone, whose cost is lost in it: it tells how long a step and its phases really take.
A *timed* step has all doors and nodes. They take turns, so that whatever else the machine does falls on both alike.
Two more steps count FLOPs and bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Literal

import torch
from torch import Tensor

from sonde.profiler import Span
from sonde.profiler.autograd_node_timers import Nodes
from sonde.profiler.flops import FlopCounter
from sonde.profiler.layer_costs import Figures, figures, spans
from sonde.profiler.module_timers import Doors
from sonde.profiler.samples_per_step import Batch, batch_of
from sonde.profiler.saved_activations import KeptBytes
from sonde.profiler.time_trace import Read, Tape
from sonde.profiler.timer_cost import door_ns, node_ns
from sonde.profiler.utilization import Utilisation, switches
from sonde.statistics.tensor_utils import find_tensors

Kind = Literal["warmup", "bare", "timed", "flops", "memory"]
MAX_SPANS = 20_000  # a trace of the first steps: more is slow to open and says the same


def plan(warmup: int, repeats: int, *, counts: bool = True) -> list[Kind]:
    """The kinds of steps, in order. What is counted comes first: a script may end early."""
    counted: list[Kind] = ["flops", "memory"] if counts else []
    measured: list[Kind] = ["bare", "timed"]
    warm: list[Kind] = ["warmup"]
    return warm * max(1, warmup) + counted + measured * repeats


@dataclass(slots=True)
class Recorded:
    """What is known after some steps."""

    bare: list[dict[str, float]] = field(default_factory=list)  # milliseconds by phase, and "step"
    timed: list[Figures] = field(default_factory=list)
    timed_ms: list[dict[str, float]] = field(default_factory=list)  # as for bare ones; what the profiler does itself is in "other"
    bare_switches: list[int] = field(default_factory=list)  # how often others took the processor away, by step
    timed_switches: list[int] = field(default_factory=list)
    flops: Figures | None = None
    kept: Figures | None = None
    batches: dict[int, list[Batch]] = field(default_factory=dict)  # by layer, of one step
    num_fetched: int = 0  # samples that loaders gave in it
    autocast: torch.dtype | None = None  # in which the products of the model are computed, where that is not its own dtype
    spans: list[Span] = field(default_factory=list)
    uncounted: set[str] = field(default_factory=set)  # operations without a formula
    failures: list[str] = field(default_factory=list)  # of the profiler itself; the steps are not kept
    utilisation: Utilisation = field(default_factory=Utilisation)
    door_ns: int = 0  # what a call and a node of a timed step cost, as measured on their own
    node_ns: int = 0


class Recorder:
    """One step at a time. `end_step` may be called whatever happened; it leaves nothing behind in the model."""

    def __init__(self, doors: Doors, *, left_out: Iterable[Tensor], read: Read = perf_counter_ns, trains: bool = False) -> None:
        """`trains`: what runs without gradients (validation between two steps) is left out."""
        self.recorded = Recorded()
        self._doors, self._left_out, self._read, self._trains = doors, list(left_out), read, trains
        self._kind: Kind = "warmup"
        self._tape: Tape | None = None
        self._nodes: Nodes | None = None
        self._around = ExitStack()  # of the backward that is under way
        self._phases: dict[str, int] = {}
        self._open: dict[str, int] = {}
        self._began = self._switches = 0
        self._zero: int | None = None  # when the first timed step began
        self._counter: FlopCounter | None = None
        self._batches: list[tuple[int, Batch]] = []  # with the place that the call has on the tape
        self._num_fetched = self._num_backwards = self._num_updates = 0  # in the step under way
        self.recorded.door_ns, self.recorded.node_ns = door_ns(read), node_ns(read)

    @property
    def is_open(self) -> bool:
        return self._tape is not None

    def begin_step(self, kind: Kind) -> None:
        self._kind = kind
        self._phases, self._open = {}, {}
        self._num_fetched = self._num_backwards = self._num_updates = 0
        self._tape = tape = self._tape_for(kind)
        self._doors.put_in(tape, roots_alone=kind == "bare")
        tape.trains = self._trains
        tape.start()
        if kind == "bare":
            self.recorded.utilisation.begin()
        self._switches = switches()
        self._began = self._read()

    def _tape_for(self, kind: Kind) -> Tape:
        if kind == "flops":
            self._counter = FlopCounter()
            return Tape(self._counter.read, self._counter.around)
        if kind == "memory":
            counter = KeptBytes(self._left_out)
            return Tape(counter.read, counter.around)
        if kind == "warmup":
            self._batches.clear()
            return Tape(self._read, self._noting)
        return Tape(self._read)

    def _noting(self, args: Any, kwargs: Any) -> AbstractContextManager[Any]:
        """What goes into the outermost modules."""
        batch = batch_of(args, kwargs)
        if batch is not None and self._tape is not None:
            self._batches.append((len(self._tape.calls), batch._replace(backward=self._num_backwards, update=self._num_updates)))
            self.recorded.autocast = _autocast()
        return nullcontext()

    # -- phases ------------------------------------------------------------------------------------

    def begin(self, phase: str) -> None:
        self._open[phase] = self._read()

    def end(self, phase: str) -> None:
        began = self._open.pop(phase, None)
        if began is not None:
            now = self._read()
            self._phases[phase] = self._phases.get(phase, 0) + now - began
            self._trace(phase, began, now)
            self._num_updates += phase == "optimizer"

    def fetched(self, batch: Any) -> None:
        """A loader gave it, in the step under way."""
        if self._kind == "warmup" and (found := batch_of((batch,), {})) is not None:
            self._num_fetched += found.num_samples

    def backward_begins(self, roots: Any) -> None:
        tape = self._tape
        if tape is None:
            return
        if self._kind in ("timed", "flops"):
            if self._nodes is None:
                self._nodes = Nodes(tape)
            self._nodes.hook(tensor for _, tensor in find_tensors(roots))
        if tape.around is not None:
            self._around.enter_context(tape.around((), {}))
        tape.backward_begins()

    def backward_ended(self) -> None:
        if self._tape is not None and self._tape.in_backward:
            self._tape.backward_ended()
            self._num_backwards += 1
        self._around.close()

    # -- the end -----------------------------------------------------------------------------------

    def end_step(self, *, keep: bool = True) -> None:
        """`keep` is False where the step failed: nothing of it is kept."""
        ended = self._read()
        num_switches = switches() - self._switches
        tape, self._tape = self._tape, None
        if tape is None:
            return
        tape.stop()
        self._around.close()
        self._doors.take_out()
        if self._nodes is not None:
            self._nodes.remove()
            self._nodes = None
        if self._kind == "bare":
            self.recorded.utilisation.pause()
        if tape.failure:
            self.recorded.failures.append(tape.failure)
        elif keep:
            self._keep(tape, ended, num_switches)

    def _keep(self, tape: Tape, ended: int, num_switches: int) -> None:
        recorded = self.recorded
        if self._kind == "bare":
            recorded.bare.append(self._times(figures(tape), ended))
            recorded.bare_switches.append(num_switches)
        elif self._kind == "timed":
            self._zero = self._began if self._zero is None else self._zero
            if len(recorded.spans) < MAX_SPANS:
                self._trace_step(tape, ended)
            found = figures(tape)
            recorded.timed.append(found)
            recorded.timed_ms.append(self._times(found, ended))
            recorded.timed_switches.append(num_switches)
        elif self._kind == "flops":
            recorded.flops = figures(tape)
            recorded.uncounted = self._counter.uncounted if self._counter is not None else set()
        elif self._kind == "memory":
            recorded.kept = figures(tape)
        elif tape.calls:  # warming up: which modules are called from outside, and with what, is known now
            self._doors.keep_roots(call.layer for call in tape.calls if call.parent is None)
            recorded.batches.clear()
            recorded.num_fetched = self._num_fetched
            for place, batch in self._batches:
                if place < len(tape.calls):
                    recorded.batches.setdefault(tape.calls[place].layer, []).append(batch)

    def _times(self, found: Figures, ended: int) -> dict[str, float]:
        step = ended - self._began
        phases = {**self._phases, "forward": found.forward, "backward": found.backward}
        phases["other"] = max(0, step - sum(phases.values()))
        return {name: ns / 1e6 for name, ns in (*phases.items(), ("step", step))}

    # -- for a trace -------------------------------------------------------------------------------

    def _trace(self, phase: str, began: int, ended: int) -> None:
        if self._kind == "timed" and len(self.recorded.spans) < MAX_SPANS:
            zero = self._zero if self._zero is not None else self._began
            self.recorded.spans.append(Span(len(self.recorded.timed), "phase", phase, (began - zero) / 1e6, (ended - began) / 1e6))

    def _trace_step(self, tape: Tape, ended: int) -> None:
        step = len(self.recorded.timed)
        assert self._zero is not None
        found = list(spans(tape, self._doors.layers, step, self._zero))
        if len(found) + len(self.recorded.spans) > MAX_SPANS and self.recorded.timed:
            return  # whole steps only
        for call in tape.calls:
            if call.parent is None and call.ended >= 0:
                self._trace("forward", call.began, call.ended)
        for first, _, end in tape.ends:
            self._trace("backward", tape.marks[first][0], end)
        self._trace("step", self._began, ended)
        self.recorded.spans += found[:MAX_SPANS]


def _autocast() -> torch.dtype | None:
    device = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
