"""Runs torch.profiler over a few steps of a running training, and writes the trace into the run directory.

torch has one profiler per process, so one serves both switches, and it does not start while a profiler of the user runs.
"""

import os
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from sonde.capture.torch_trace_file import write_trace
from sonde.events import TorchProfileWritten
from sonde.statistics.private_torch_api import is_profiling

NUM_STEPS = 10  # profiled before the switch turns itself off: longer traces are slow to open and use much memory
TRACES = "traces"  # folder in the run's directory
NUM_OPERATIONS = 5  # in the event, the most expensive

PLAIN, TENSORBOARD = "autograd_profiler", "tensorboard_profiler"


class TorchProfilerRun:
    """Runs torch.profiler over a few steps and writes its trace."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / TRACES
        self._profiler: torch.profiler.profile | None = None
        self.requested_by: tuple[str, ...] = ()  # the switches
        self._first = self._num = 0

    @property
    def active(self) -> bool:
        return self._profiler is not None

    def start(self, switches: tuple[str, ...], step: int) -> bool:
        """Start at this step. Returns False if another profiler runs; the caller may try again."""
        if is_profiling():
            return False
        detailed = TENSORBOARD in switches
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        # No stacks: writing Python stacks takes seconds even for a few small steps, and the training waits.
        profiler = torch.profiler.profile(activities=activities, record_shapes=detailed, with_flops=detailed)
        # Kineto prints to stderr when it starts, unless the level is set before its first use.
        with ExitStack() as undo:
            if "KINETO_LOG_LEVEL" not in os.environ:
                os.environ["KINETO_LOG_LEVEL"] = "99"
                undo.callback(os.environ.pop, "KINETO_LOG_LEVEL", None)
            profiler.start()
        self._profiler, self.requested_by, self._first, self._num = profiler, switches, step, 0
        return True

    def on_step_end(self) -> bool:
        """Returns whether enough steps have been profiled."""
        self._num += 1
        return self._num >= NUM_STEPS

    def stop(self) -> TorchProfileWritten | None:
        """Stop and write the trace. Returns None without a complete step."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return None
        profiler.stop()
        if not self._num:
            return None
        self._directory.mkdir(exist_ok=True)
        ending = "pt.trace.json.gz" if TENSORBOARD in self.requested_by else "json.gz"  # TensorBoard requires this suffix
        target = self._directory / f"steps-{self._first:06d}-{self._first + self._num - 1:06d}_{os.getpid()}.{time.time_ns()}.{ending}"
        write_trace(profiler, target)
        results: Any = profiler.profiler.kineto_results if profiler.profiler is not None else None
        times = sorted(self_times(results.events()).items(), key=lambda item: -item[1])
        profiler.profiler = None  # frees the events: the object itself is in a reference cycle
        averages = {name: round(ns / 1e6 / self._num, 4) for name, ns in times[:NUM_OPERATIONS]}
        return TorchProfileWritten(num_steps=self._num, trace=f"{TRACES}/{target.name}", ms_per_step=averages)


def self_times(events: Iterable[Any]) -> dict[str, int]:
    """Nanoseconds by operation on the CPU, without the operations that it calls. torch's own `key_averages` makes several Python objects
    of each event, which takes longer than small steps themselves."""
    calls = [
        (event.start_thread_id(), event.start_ns(), -event.duration_ns(), event.name())
        for event in events if event.device_type().name == "CPU" and not event.is_async()
    ]  # fmt: skip
    times: dict[str, int] = {}
    open_calls: list[tuple[int, int, str]] = []  # thread, end, name; the innermost last
    for thread, start, duration, name in sorted(calls):  # of two that start together, the longer one is outside
        while open_calls and (open_calls[-1][0] != thread or open_calls[-1][1] <= start):
            open_calls.pop()
        if open_calls:
            times[open_calls[-1][2]] += duration
        times[name] = times.get(name, 0) - duration
        open_calls.append((thread, start - duration, name))
    return times
