"""Profiles occasional steps in detail: time per line and layer, synchronization points, transfers.

A profile may cost as much as the step itself, so it is rare: the first after 0.4 s of training (20 s with tiny steps), each next one after
twice the time, or later if the last one was expensive. If slow steps occur at equal distances, the next slow one is profiled too. If the
step moved tensors between devices, the transfers of the next step are recorded too.
"""

from collections import deque
from contextlib import ExitStack
from time import perf_counter_ns, thread_time_ns
from typing import Any

from sonde.capture.disable_failing_probes import ErrorIsolation
from sonde.capture.run_log_recorder import StepRecorder
from sonde.capture.step_phase_timer import PhaseTimer
from sonde.capture.step_profiler.cpu_usage import CpuUsage
from sonde.capture.step_profiler.device_transfers import DeviceTransfers
from sonde.capture.step_profiler.layers_of_profiled_step import LayerTimes
from sonde.capture.step_profiler.line_times import LineTimes
from sonde.capture.step_profiler.sync_points import SyncPoints
from sonde.capture.watched_models_registry import ModelRegistry
from sonde.config import MeasuredParts
from sonde.events import StepProfile, TransfersMeasured

FIRST_NS = 400_000_000  # of training: a shorter one is not worth optimizing
LIGHT_NS = 4_000_000  # shorter steps are profiled only …
LONG_NS = 20_000_000_000  # … after this time of training
SHARE = 0.01  # maximum cost, as a share of the training time since the last profile
MAX_DELAY = 8  # steps to wait for one that is not observed; with cheap observing, all steps are observed
WARMUP = 8  # steps in which caches fill and memory is allocated
SLOW = 2.5  # times the usual step: above the noise of a busy machine
SLOW_NS = 2_000_000  # minimum difference to the usual step
MEMORY = 0.9  # weight of the running average of the usual step
MAX_SLOW = 6  # profiled slow steps per run: they are similar

_ISOLATION_KEY = ("step_profiler", "")


class StepProfiler:
    """Decides which steps are profiled, and records lines, layers, synchronization points and transfers of one."""

    def __init__(
        self, recorder: StepRecorder, models: ModelRegistry, timer: PhaseTimer, isolation: ErrorIsolation, measured: MeasuredParts
    ) -> None:
        self._recorder, self._models, self._timer, self._isolation = recorder, models, timer, isolation
        self._lines, self._sync_points, self._layers, self._cpu = LineTimes(timer), SyncPoints(), LayerTimes(timer), CpuUsage()
        self._transfers = DeviceTransfers(timer, models)
        self._is_enabled, self._every = measured.lines, measured.lines_every
        self._is_due = False
        self.is_active = False
        self._is_full = False  # all of the step is profiled; else, while active, only its transfers are recorded
        self.is_compiling = False  # torch.compile guards on the patched functions and would recompile
        self.due_ns, self.long_ns = FIRST_NS, LONG_NS  # training time of the next profile
        self._num_delayed = 0
        self._trained_ns = 0
        self._usual_ns = 0.0
        self._slow: deque[int] = deque(maxlen=16)  # numbers of the last slow steps
        self._expected = -1
        self._num_slow = 0
        self._reason = ""
        self._fetch_ns = self._fetch_cpu_ns = 0

    def on_step_start(self, step: int, last_ns: int, *, is_observed: bool) -> None:
        """Called for every step. `last_ns` is the duration of the last step without Sonde; observed steps are avoided."""
        if not self._is_enabled:
            return
        self._trained_ns += last_ns
        if self._every is not None:
            self._is_due = self._is_due or step % self._every == 0
            if self._is_due and not self._should_wait(is_observed):
                self._is_due = False
                self._start("asked")
            return
        if step <= WARMUP:
            self._usual_ns = last_ns
            return
        if last_ns > SLOW * self._usual_ns + SLOW_NS:
            self._expect(step - 1)
        else:
            self._usual_ns += (1 - MEMORY) * (last_ns - self._usual_ns)
        if self._trained_ns >= self.due_ns:
            if (self._usual_ns >= LIGHT_NS or self._trained_ns >= self.long_ns) and not self._should_wait(is_observed):
                self._start("")
        elif step == self._expected and self._num_slow < MAX_SLOW and self._trained_ns > FIRST_NS:
            self._num_slow += 1
            self._start("slow")

    def _should_wait(self, is_observed: bool) -> bool:
        """Whether a due profile waits for a step that is not observed."""
        self._num_delayed = self._num_delayed + 1 if is_observed and self._num_delayed < MAX_DELAY else 0
        return self._num_delayed > 0

    def _expect(self, slow: int) -> None:
        """After three slow steps at equal distances, expect the fourth."""
        for earlier in reversed(self._slow):
            if slow - earlier > 1 and 2 * earlier - slow in self._slow:
                self._expected = 2 * slow - earlier
                break
        self._slow.append(slow)

    def _start(self, reason: str) -> None:
        self.due_ns = 2 * self._trained_ns
        if self.is_compiling or _ISOLATION_KEY in self._isolation.disabled or any(watched.is_compiled for watched in self._models):
            return
        self._reason = reason
        self._fetch_ns = self._fetch_cpu_ns = 0
        self.is_active = self._is_full = True
        try:
            self._timer.on_change = self._on_phase_change
            self._transfers.start()  # first, because it may stay longer and both patch .cpu()
            self._sync_points.start()
            self._layers.start(self._models)
            self._lines.start()
        except Exception as error:
            self._on_error(error)

    def _on_phase_change(self, phase: str, begins: bool) -> None:
        if begins:
            self._lines.resume()
        if phase == "data":  # separates computing from waiting for a disk or another process
            sign = -1 if begins else 1
            self._fetch_ns += sign * perf_counter_ns()
            self._fetch_cpu_ns += sign * thread_time_ns()

    def on_backward_start(self, tensors: Any) -> None:
        """Called in a profiled step, in any thread."""
        try:
            self._layers.on_backward_start(tensors)
        except Exception as error:
            self._on_error(error)

    def on_backward_end(self) -> None:
        self._layers.on_backward_end()

    def on_step_end(self, step: int) -> None:
        """Write the profile of this step, if there is one."""
        if not self.is_active:
            return
        try:
            was_full, num_moved = self._is_full, self._transfers.num
            if was_full:
                self._write_profile(step)
            transfers = self._transfers.finish_step()
            if transfers is not None:
                self._recorder.emit(TransfersMeasured(transfers=[_rounded(transfer) for transfer in transfers]), step)
            self._deactivate()
            if was_full and num_moved:
                self.is_active = True
            else:
                self._transfers.stop()
        except Exception as error:
            self._on_error(error)

    def _write_profile(self, step: int) -> None:
        own_ns = self._timer.own_ns
        lines, waits, layers = self._lines.stop(), self._sync_points.stop(), self._layers.stop()
        event = StepProfile(
            reason=self._reason, lines=[_rounded(line) for line in lines if line["ms"] >= 0.001],
            waits=[_rounded(point) for point in waits], layers=[_rounded(layer) for layer in layers],
            num_transfers=self._transfers.num, machine=self._cpu.since_last(), fetch_ms=round(self._fetch_ns / 1e6, 3),
            fetch_cpu_ms=round(self._fetch_cpu_ns / 1e6, 3),
        )  # fmt: skip
        self._recorder.emit(event, step)
        self.due_ns = max(self.due_ns, self._trained_ns + int(own_ns / SHARE))

    def give_up(self) -> None:
        """Remove all hooks and patches, even in the middle of a step."""
        if self.is_active:
            with ExitStack() as stack:
                stack.callback(self._deactivate)
                for part in (self._transfers, self._sync_points, self._layers, self._lines):  # the last one first
                    stack.callback(part.stop)

    def _deactivate(self) -> None:
        self.is_active = self._is_full = False
        self._timer.on_change = None

    def _on_error(self, error: Exception) -> None:
        self.give_up()
        self._isolation.report(*_ISOLATION_KEY, error)


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}
