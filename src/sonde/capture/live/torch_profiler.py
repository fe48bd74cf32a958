"""torch.profiler over a few steps of a training that is under way: begun and ended between two steps, written beside the run.

One profiler serves both switches that want one, since torch has one per process. While a profiler of the user's runs, ours waits.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from sonde.events import TorchProfileWritten
from sonde.statistics.torch_internals import is_profiling

NUM_STEPS = 10  # that are profiled before the switch turns itself off: a trace of more is slow to open, and fills memory
TRACES = "traces"  # folder in the run's directory
NUM_OPERATIONS = 5  # operations

PLAIN, TENSORBOARD = "autograd_profiler", "tensorboard_profiler"


class TorchProfilerRun:
    """Runs torch.profiler over a few steps and writes its trace."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / TRACES
        self._profiler: torch.profiler.profile | None = None
        self.asked_by: tuple[str, ...] = ()  # the switches
        self._first = self._num = 0

    @property
    def active(self) -> bool:
        return self._profiler is not None

    def start(self, switches: tuple[str, ...], step: int) -> bool:
        """Profile from this step on. False where another profiler runs: it may be tried again."""
        if is_profiling():
            return False
        detailed = TENSORBOARD in switches
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        # No stacks: those of Python take seconds to write even for a few small steps, and this training goes on afterwards.
        profiler = torch.profiler.profile(activities=activities, record_shapes=detailed, with_flops=detailed, acc_events=True)
        # Kineto tells stderr when it starts, unless told otherwise before its first use.
        with ExitStack() as undo:
            if "KINETO_LOG_LEVEL" not in os.environ:
                os.environ["KINETO_LOG_LEVEL"] = "99"
                undo.callback(os.environ.pop, "KINETO_LOG_LEVEL", None)
            profiler.start()
        self._profiler, self.asked_by, self._first, self._num = profiler, switches, step, 0
        return True

    def on_step_end(self) -> bool:
        """Returns whether enough steps are profiled."""
        self._num += 1
        return self._num >= NUM_STEPS

    def stop(self) -> TorchProfileWritten | None:
        """Stop and write the trace; None where it has not one step."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return None
        profiler.stop()
        if not self._num:
            return None
        self._directory.mkdir(exist_ok=True)
        ending = "pt.trace.json.gz" if TENSORBOARD in self.asked_by else "json.gz"  # TensorBoard looks for that name
        target = self._directory / f"steps-{self._first:06d}-{self._first + self._num - 1:06d}_{os.getpid()}.{time.time_ns()}.{ending}"
        profiler.export_chrome_trace(str(target))
        rows = sorted(profiler.key_averages(), key=lambda row: row.self_cpu_time_total, reverse=True)
        averages = {row.key: round(row.self_cpu_time_total / 1e3 / self._num, 4) for row in rows[:NUM_OPERATIONS]}
        return TorchProfileWritten(num_steps=self._num, trace=f"{TRACES}/{target.name}", ms_per_step=averages)
