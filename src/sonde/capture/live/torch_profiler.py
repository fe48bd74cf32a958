"""torch.profiler over a few steps of a training that is under way: begun and ended between two steps, written beside the run.

One profiler serves both switches that want one, since torch has one per process. Where the user's own is running, ours waits.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

NUM_STEPS = 10  # that are profiled before the switch turns itself off: a trace of more is slow to open, and fills memory
TRACES = "traces"  # folder in the run's directory
NUM_TOLD = 5  # operations

PLAIN, TENSORBOARD = "autograd_profiler", "tensorboard_profiler"


class Tracing:
    def __init__(self, directory: Path) -> None:
        self._directory = directory / TRACES
        self._profiler: torch.profiler.profile | None = None
        self.asked_by: tuple[str, ...] = ()  # the switches
        self._first = self._num = 0

    @property
    def active(self) -> bool:
        return self._profiler is not None

    def begin(self, switches: tuple[str, ...], step: int) -> bool:
        """From this step on. False where somebody else profiles: it may be asked again."""
        if torch._C._autograd._profiler_enabled():
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

    def step_ended(self) -> bool:
        """Whether enough was seen."""
        self._num += 1
        return self._num >= NUM_STEPS

    def end(self) -> dict[str, Any] | None:
        """Stops, and writes what was seen; None where not one step was."""
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
        told = {row.key: round(row.self_cpu_time_total / 1e3 / self._num, 4) for row in rows[:NUM_TOLD]}
        return {"num_steps": self._num, "trace": f"{TRACES}/{target.name}", "ms_per_step": told}
