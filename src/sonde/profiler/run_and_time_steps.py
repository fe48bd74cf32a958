"""Records training steps with timers or counters installed.

A *bare* step has timers on the outermost modules alone and gives the duration of a step and its phases. A *timed* step has timers on all
modules and autograd nodes. Bare and timed steps alternate, so that other load on the machine affects both alike. Two more steps count FLOPs
and the bytes saved for the backward.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from itertools import takewhile
from time import perf_counter_ns
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from sonde.capture.layer_timing.autograd_node_timers import AutogradNodeTimers
from sonde.capture.layer_timing.layer_call_trace import OUTSIDE, LayerCall, LayerCallTrace, ReadCounter
from sonde.capture.layer_timing.layer_times_from_trace import LayerCosts, evaluate, intervals
from sonde.profiler import Span
from sonde.profiler.choose_timed_modules import TimedModule, TimedModules
from sonde.profiler.flops import FlopCounter
from sonde.profiler.samples_per_step import InputBatch, input_batch
from sonde.profiler.saved_activations import SavedActivations
from sonde.profiler.timer_overhead import TimerCost, timer_cost
from sonde.profiler.utilization import UtilizationMeter, num_preemptions
from sonde.statistics.find_tensors import find_tensors

StepKind = Literal["warmup", "bare", "timed", "flops", "memory"]
ENOUGH = 5  # steps for a median and quartiles: if that many were undisturbed, only such steps are used
MAX_SPANS = 20_000  # of the first steps, for a trace file: more is slow to open and shows nothing new


def plan_steps(warmup: int, repeats: int, *, with_counters: bool = True) -> list[StepKind]:
    """The kinds of steps, in order. The counting steps come first: a script may end early."""
    counting: list[StepKind] = ["flops", "memory"] if with_counters else []
    measured: list[StepKind] = ["bare", "timed"]
    warm: list[StepKind] = ["warmup"]
    return warm * max(1, warmup) + counting + measured * repeats


@dataclass(slots=True)
class StepRecordings:
    """The measurements of all recorded steps."""

    bare: list[dict[str, float]] = field(default_factory=list)  # milliseconds by phase, and "step"
    timed: list[LayerCosts] = field(default_factory=list)
    timed_ms: list[dict[str, float]] = field(default_factory=list)  # as `bare`; the profiler's own work is in "other"
    bare_preemptions: list[int] = field(default_factory=list)  # per step: how often the system gave the processor to another program
    timed_preemptions: list[int] = field(default_factory=list)
    flops: LayerCosts | None = None
    saved_bytes: LayerCosts | None = None
    batches: dict[int, list[InputBatch]] = field(default_factory=dict)  # by layer, of one step
    num_fetched: int = 0  # samples from data loaders in that step
    autocast: torch.dtype | None = None  # dtype of the matrix products under autocast
    spans: list[Span] = field(default_factory=list)
    uncounted: set[str] = field(default_factory=set)  # operations without a FLOP formula
    failures: list[str] = field(default_factory=list)  # errors of the profiler itself; these steps were discarded
    utilization: UtilizationMeter = field(default_factory=UtilizationMeter)
    timer_cost: TimerCost = field(default_factory=TimerCost)

    @property
    def num_undisturbed(self) -> int:
        """The number of steps without a preemption, of the kind (bare or timed) that has fewer."""
        return min(self.bare_preemptions.count(0), self.timed_preemptions.count(0))

    def least_disturbed(self) -> Self:
        """The steps that other programs interrupted least. On an idle machine these are all steps; on a busy one a short step is either
        undisturbed or many times as long."""
        bare = _least_preempted(self.bare_preemptions, [step["step"] for step in self.bare])
        timed = _least_preempted(self.timed_preemptions, [step["step"] for step in self.timed_ms])
        return replace(
            self, bare=[self.bare[index] for index in bare], timed=[self.timed[index] for index in timed],
            timed_ms=[self.timed_ms[index] for index in timed], bare_preemptions=[self.bare_preemptions[index] for index in bare],
            timed_preemptions=[self.timed_preemptions[index] for index in timed],
        )  # fmt: skip

    @property
    def disturbed_share(self) -> float:
        """The share of all bare and timed steps in which the system gave the processor to another program."""
        counts = [*self.bare_preemptions, *self.timed_preemptions]
        return sum(count > 0 for count in counts) / len(counts) if counts else math.nan


class ProfileRecorder:
    """Records one step at a time; `end_step` may be called at any moment and leaves nothing on the model."""

    def __init__(
        self, modules: TimedModules, *, excluded: Iterable[Tensor], read: ReadCounter = perf_counter_ns, follows_training: bool = False
    ) -> None:
        """`excluded` tensors (parameters, buffers) do not count as saved activations. With `follows_training`, the steps are those of a
        training loop: forward calls under no_grad (validation) are ignored. Without it, the caller runs the model with `run_forward`."""
        self.recordings = StepRecordings(timer_cost=timer_cost(read))
        self._layers, self._timers = modules.layers, modules.timers
        self._excluded, self._read, self._follows_training = list(excluded), read, follows_training
        self._kind: StepKind = "warmup"
        self._trace: LayerCallTrace | None = None
        self._node_timers: AutogradNodeTimers | None = None
        self._backward_context = ExitStack()
        self._phases: dict[str, int] = {}
        self._open_phases: dict[str, int] = {}
        self._start = self._preemptions = 0
        self._zero: int | None = None  # start of the first timed step
        self._counter = FlopCounter()
        self._batches: list[tuple[int, InputBatch]] = []  # with the index of the call in the trace
        self._num_fetched = self._num_backwards = self._num_updates = 0  # in the current step

    def start_step(self, kind: StepKind) -> None:
        self._kind, self._phases, self._open_phases = kind, {}, {}
        self._num_fetched = self._num_backwards = self._num_updates = 0
        self._trace = trace = self._trace_for(kind)
        self._timers.install(trace, only_roots=kind == "bare", watch_roots=self._follows_training)
        trace.requires_grad_mode = self._follows_training
        trace.start()
        if kind == "bare":
            self.recordings.utilization.start()
        self._preemptions = num_preemptions()
        self._start = self._read()

    def _trace_for(self, kind: StepKind) -> LayerCallTrace:
        if kind == "flops":
            self._counter = FlopCounter()
            return LayerCallTrace(self._counter.read, self._counter.context)
        if kind == "memory":
            counter = SavedActivations(self._excluded)
            return LayerCallTrace(counter.read, counter.context)
        if kind == "warmup":
            self._batches.clear()
            return LayerCallTrace(self._read, self._on_outermost_call)
        return LayerCallTrace(self._read)

    def _on_outermost_call(self, args: Any, kwargs: Any) -> AbstractContextManager[Any]:
        batch = input_batch(args, kwargs)
        if batch is not None and self._trace is not None:
            batch = batch._replace(num_backwards=self._num_backwards, num_updates=self._num_updates)
            self._batches.append((len(self._trace.calls), batch))
            self.recordings.autocast = _autocast_dtype()
        return nullcontext()

    def run_forward(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls the model and records the call; in a bare step nothing else is installed."""
        if self._kind != "bare":
            return model(*args, **kwargs)
        self._timers.on_forward_start(model, args, dict(kwargs))
        output = None
        try:
            output = model(*args, **kwargs)
        finally:
            self._timers.on_forward_end(model, output)
        return output

    def start_phase(self, phase: str) -> None:
        self._open_phases[phase] = self._read()

    def end_phase(self, phase: str) -> None:
        start = self._open_phases.pop(phase, None)
        if start is not None:
            end = self._read()
            self._phases[phase] = self._phases.get(phase, 0) + end - start
            self._add_span(phase, start, end)
            self._num_updates += phase == "optimizer"

    def add_fetched(self, batch: Any) -> None:
        """Counts the samples of a batch from a data loader."""
        if self._kind == "warmup" and (fetched := input_batch((batch,), {})) is not None:
            self._num_fetched += fetched.num_samples

    def start_backward(self, roots: Any) -> None:
        trace = self._trace
        if trace is None:
            return
        if self._kind in ("timed", "flops"):
            if self._node_timers is None:
                self._node_timers = AutogradNodeTimers(trace)
            self._node_timers.install(tensor for _, tensor in find_tensors(roots))
        if trace.context is not None:
            self._backward_context.enter_context(trace.context((), {}))
        trace.start_backward()

    def end_backward(self) -> None:
        if self._trace is not None and self._trace.in_backward:
            self._trace.end_backward()
            self._num_backwards += 1
        self._backward_context.close()

    def end_step(self, *, discard: bool = False) -> None:
        """Removes the timers and stores the measurements, unless the step failed (`discard`)."""
        end = self._read()
        preemptions = num_preemptions() - self._preemptions
        trace, self._trace = self._trace, None
        if trace is None:
            return
        trace.stop()
        self._backward_context.close()
        self._timers.remove()
        if self._node_timers is not None:
            self._node_timers.remove()
            self._node_timers = None
        if self._kind == "bare":
            self.recordings.utilization.pause()
        if trace.failure:
            self.recordings.failures.append(trace.failure)
        elif not discard:
            self._store(trace, end, preemptions)

    def _store(self, trace: LayerCallTrace, end: int, preemptions: int) -> None:
        recordings = self.recordings
        if self._kind == "bare":
            recordings.bare.append(self._phase_times(evaluate(trace), end))
            recordings.bare_preemptions.append(preemptions)
        elif self._kind == "timed":
            self._zero = self._start if self._zero is None else self._zero
            if len(recordings.spans) < MAX_SPANS:
                self._add_step_spans(trace, end)
            costs = evaluate(trace)
            recordings.timed.append(costs)
            recordings.timed_ms.append(self._phase_times(costs, end))
            recordings.timed_preemptions.append(preemptions)
        elif self._kind == "flops":
            recordings.flops = evaluate(trace)
            recordings.uncounted = self._counter.uncounted
        elif self._kind == "memory":
            recordings.saved_bytes = evaluate(trace)
        elif trace.calls:  # warm-up: it shows which modules are outermost, and their inputs
            self._timers.set_roots(call.layer for call in trace.calls if call.parent is None)
            recordings.batches.clear()
            recordings.num_fetched = self._num_fetched
            for index, batch in self._batches:
                if index < len(trace.calls):
                    recordings.batches.setdefault(trace.calls[index].layer, []).append(batch)

    def _phase_times(self, costs: LayerCosts, end: int) -> dict[str, float]:
        step = end - self._start
        phases = {**self._phases, "forward": costs.forward, "backward": costs.backward}
        phases["other"] = max(0, step - sum(phases.values()))
        return {name: ns / 1e6 for name, ns in (*phases.items(), ("step", step))}

    def _add_span(self, phase: str, start: int, end: int) -> None:
        if self._kind == "timed" and len(self.recordings.spans) < MAX_SPANS:
            zero = self._zero if self._zero is not None else self._start
            self.recordings.spans.append(Span(len(self.recordings.timed), "phase", phase, (start - zero) / 1e6, (end - start) / 1e6))

    def _add_step_spans(self, trace: LayerCallTrace, end: int) -> None:
        step = len(self.recordings.timed)
        assert self._zero is not None
        layer_spans = list(_spans(trace, self._layers, step, self._zero))
        if len(layer_spans) + len(self.recordings.spans) > MAX_SPANS and self.recordings.timed:
            return  # only whole steps
        for call in trace.calls:
            if call.parent is None and call.end >= 0:
                self._add_span("forward", call.start, call.end)
        for first, _, backward_end in trace.backwards:
            self._add_span("backward", trace.marks[first][0], backward_end)
        self._add_span("step", self._start, end)
        self.recordings.spans += layer_spans[:MAX_SPANS]


def _autocast_dtype() -> torch.dtype | None:
    device = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _least_preempted(preemptions: Sequence[int], durations: Sequence[float]) -> list[int]:
    """All undisturbed steps; if these are fewer than `ENOUGH`, also the least disturbed and among these the shortest ones."""
    order = sorted(range(len(preemptions)), key=lambda index: (preemptions[index], durations[index]))
    return sorted(order[: max(preemptions.count(0), ENOUGH)])


def _spans(trace: LayerCallTrace, layers: list[TimedModule], step: int, zero: int) -> Iterator[Span]:
    """One span per forward call; in the backward, consecutive nodes of one call joined, nested in the spans of the calls around it."""

    def span(kind: str, name: str, start: int, end: int) -> Span:
        return Span(step, kind, name, (start - zero) / 1e6, (end - start) / 1e6)

    for call in trace.calls:
        if call.end >= 0:
            yield span("forward", layers[call.layer].path, call.start, call.end)
    open_calls: list[tuple[LayerCall, int]] = []
    last_end = 0
    for start, end, owner in intervals(trace):
        if start != last_end:  # the next backward pass
            yield from (span("backward", layers[call.layer].path, opened, last_end) for call, opened in open_calls)
            open_calls.clear()
        if owner is OUTSIDE:
            yield span("backward", "(loss)", start, end)
        chain = _with_ancestors(owner) if owner.layer >= 0 else []
        num_common = sum(1 for _ in takewhile(lambda pair: pair[0][0] is pair[1], zip(open_calls, chain)))
        yield from (span("backward", layers[call.layer].path, opened, start) for call, opened in open_calls[num_common:])
        open_calls[num_common:] = [(call, start) for call in chain[num_common:]]
        last_end = end
    yield from (span("backward", layers[call.layer].path, opened, last_end) for call, opened in open_calls)


def _with_ancestors(call: LayerCall) -> list[LayerCall]:
    """The call after all calls around it, the outermost first."""
    return [*(_with_ancestors(call.parent) if call.parent is not None else ()), call]
