"""Runs torch.profiler over a few steps of a running training, and writes the trace into the run directory.

torch has one profiler per process, so one serves both switches, and it does not start while a profiler of the user runs.
"""

import os
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

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
        profiler = torch.profiler.profile(activities=activities, record_shapes=detailed, with_flops=detailed, acc_events=True)
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
        profiler.export_chrome_trace(str(target))
        rows = sorted(profiler.key_averages(), key=lambda row: row.self_cpu_time_total, reverse=True)
        averages = {row.key: round(row.self_cpu_time_total / 1e3 / self._num, 4) for row in rows[:NUM_OPERATIONS]}
        return TorchProfileWritten(num_steps=self._num, trace=f"{TRACES}/{target.name}", ms_per_step=averages)
