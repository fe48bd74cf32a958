"""The history of a loop's operations, bounded in memory. Each operation is checked against the earlier ones, never against a fixed number
of bytes or seconds."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from sonde.formatting import number
from sonde.memory_trend import MemoryTrend, SteadyGrowth
from sonde.rules.gradients.exploding_gradient import LEAP
from sonde.spike_detection import ENOUGH, LogNormBound, LossBound, SpreadBound
from sonde.tools.gradient_flow_animator import EXPLODING
from sonde.tools.loop_debugger.loop_operation_record import DebugInfo

MAX_STORED = 10_000  # operations; all are counted
MAX_TIMES = 1000  # of one operation, for its quantiles
MAX_NOTES = 20  # stored of each kind, the first ones; all are counted
SLOW = math.log(2.5)  # times the usual: on a busy machine single operations are slower too
SLOW_SHARE = 0.5  # of the usual time of the enclosing operation: a shorter delay does not matter
LEAK_SHARE = 0.05  # of the memory at first: allocators take less than that in a short run
TREND_INTERVAL = 16  # measurements between two computations of the trend of memory


@dataclass(slots=True)
class OperationCalls:
    """All calls of one operation inside one enclosing operation."""

    name: str
    inside: str
    num_calls: int = 0
    total_s: float = 0.0
    num_errors: int = 0
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))
    usual: SpreadBound = field(default_factory=lambda: SpreadBound(SLOW))  # of the logarithm of its time


class MemorySeries:
    """Memory of one kind over the operations, MiB, and its trend."""

    def __init__(self) -> None:
        self._growth = MemoryTrend()
        self.num = 0
        self.first = self.last = self.peak = self.total = 0.0
        self.trend: SteadyGrowth | None = None

    def update(self, used: float) -> None:
        if not self.num:
            self.first = used
        self.num += 1
        self.last, self.peak, self.total = used, max(self.peak, used), self.total + used
        self._growth.update(self.num, used)
        if not self.num % TREND_INTERVAL:
            self.trend = self._growth.trend(LEAK_SHARE * max(self.first, 1.0))

    @property
    def mean(self) -> float | None:
        return self.total / self.num if self.num else None


class GradientNorms:
    """Detects an exploding gradient norm from the first step on. The first norm is compared with the norm of the parameters, the following
    ones with the median of those before, and from the 32nd on with the bound that a session uses (`spike_detection.LogNormBound`)."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._recent = LogNormBound()

    def update(self, norm: float, param_norm: Callable[[], float]) -> str:
        """Take the next norm, finite and above zero. Returns what it is compared with if it explodes, else ""."""
        leap = self._recent.update(math.log(norm))
        if leap is not None:
            return f"usually about {number(math.exp(leap.usual))}"
        if len(self._first) >= ENOUGH:
            return ""
        earlier = median(self._first) if self._first else None
        self._first.append(norm)
        if earlier is not None:
            return f"before about {number(earlier)}" if norm > LEAP * earlier else ""
        usual = param_norm()
        return f"{number(norm / usual)} times the norm of the parameters" if 0 < EXPLODING * usual < norm else ""


class OperationHistory:
    """Stores each operation when it ends, after checks against the earlier ones. `report(kind, sentence)` is called for each problem."""

    def __init__(self, report: Callable[[str, str], None], *, logs_memory: bool = True, logs_times: bool = True) -> None:
        self._report = report
        self._logs_memory, self.logs_times = logs_memory, logs_times
        self.infos: deque[DebugInfo] = deque(maxlen=MAX_STORED)
        self.operations: dict[tuple[str, str], OperationCalls] = {}
        self.last_times_s: dict[str, float] = {}  # of the last operation of each name
        self.num = 0
        # One value per outermost operation, except for losses and gradient norms: one per measurement, with the number of its operation.
        self.times_s: deque[float] = deque(maxlen=MAX_STORED)
        self.memory_mb: deque[float] = deque(maxlen=MAX_STORED)
        self.losses: deque[tuple[int, float]] = deque(maxlen=MAX_STORED)
        self.gradient_norms: deque[tuple[int, float]] = deque(maxlen=MAX_STORED)
        self.memory, self.gpu = MemorySeries(), MemorySeries()
        self.num_anomalies = self.num_slow = self.num_leaks = self.num_gradient_anomalies = 0
        self.events: deque[tuple[int, str]] = deque(maxlen=MAX_STORED)  # number of an operation, kind of its problem
        self.anomalies: list[str] = []  # the first ones
        self.other_notes: list[str] = []
        self.statistics: dict[str, dict[str, dict[str, float]]] = {}  # the latest, of outputs and of weights
        self._recent_losses: dict[str, LossBound] = {}  # by operation
        self._recent_norms: dict[str, GradientNorms] = {}

    def next_number(self, name: str, inside: str) -> int:
        """How many operations of this name have ended."""
        return self.operations[name, inside].num_calls if (name, inside) in self.operations else 0

    def add(self, info: DebugInfo, *, cpu_s: float | None = None) -> None:
        """Store an operation that has ended. `cpu_s`: its time on a processor, where another program interrupted it."""
        self.num += 1
        calls = self.operations.setdefault((info.operation, info.inside), OperationCalls(info.operation, info.inside))
        calls.num_calls += 1
        calls.num_errors += bool(info.error)
        time_s = info.execution_time
        calls.total_s += time_s
        calls.times_s.append(time_s)
        self.last_times_s[info.operation] = time_s
        if self.logs_times:
            if not info.inside:
                self.times_s.append(time_s)
            if time_s > 0 and not info.error:
                self._check_time(info, calls, time_s, cpu_s)
        if self._logs_memory and not info.inside:
            self.memory_mb.append(info.memory_usage)
            self._check_memory(info)
        self.infos.append(info)

    def check_loss(self, info: DebugInfo, loss: float) -> None:
        """A loss was measured."""
        self.losses.append((info.number, loss))
        if not math.isfinite(loss):
            self.add_anomaly(info, "not finite", f"the loss is {number(loss)}")
            return
        leap = self._recent_losses.setdefault(info.operation, LossBound()).update(loss)
        if leap is not None:
            self.add_anomaly(info, "loss spike", f"the loss rises to {number(loss)}, usually about {number(leap.usual)}")

    def check_gradient_norm(
        self, info: DebugInfo, norm: float, param_norm: Callable[[], float] = float, *, first_bad: str = "", has_gradients: bool = True
    ) -> None:
        """A gradient norm was measured. `param_norm` returns the norm of all parameters, which is measured only for the first gradient norm
        (0: unknown); `first_bad` is the first parameter with a non-finite gradient."""
        self.gradient_norms.append((info.number, norm))
        if not math.isfinite(norm):
            kind = "not finite"
            sentence = f"the gradient of {first_bad} is not finite" if first_bad else f"the gradient norm is {number(norm)}"
        elif norm <= 0:
            kind = "zero gradient"
            sentence = f"the gradient norm is 0: {'all gradients are zero' if has_gradients else 'no parameter has a gradient'}"
        elif compared := self._recent_norms.setdefault(info.operation, GradientNorms()).update(norm, param_norm):
            kind, sentence = "exploding gradient", f"the gradient norm explodes: {number(norm)}, {compared}"
        else:
            return
        self.num_gradient_anomalies += 1
        self.add_anomaly(info, kind, sentence)

    def _check_time(self, info: DebugInfo, calls: OperationCalls, time_s: float, cpu_s: float | None) -> None:
        slow = calls.usual.update(math.log(time_s))
        if slow is None or (cpu_s is not None and math.log(max(cpu_s, 1e-9)) <= slow.bound):
            return  # usual, or slow because another program had the processor
        around = next((one.usual.median for one in self.operations.values() if one.name == info.inside and one.usual.num), -math.inf)
        usual = math.exp(slow.usual)
        if time_s - usual >= SLOW_SHARE * math.exp(around):
            info.performance_issue_detected = True
            self.num_slow += 1
            self.add_note(info, "slow", f"{info.operation} took {number(time_s * 1e3)} ms, usually about {number(usual * 1e3)} ms")

    def _check_memory(self, info: DebugInfo) -> None:
        for used, series, name in ((info.memory_usage, self.memory, "memory"), (info.gpu_memory, self.gpu, "GPU memory")):
            was_growing = series.trend is not None
            series.update(used)
            trend = series.trend
            info.memory_leak_detected |= trend is not None
            if trend is not None and not was_growing:
                self.num_leaks += 1
                rate, first, last = map(number, (trend.per_step, trend.first, trend.last))
                self.add_note(info, "memory growth", f"{name} grows by {rate} MiB per operation: from {first} to {last} MiB")

    def add_anomaly(self, info: DebugInfo, kind: str, sentence: str) -> None:
        """Store and report an anomaly of a running operation. An operation counts once, however many it has."""
        if not info.anomaly_detected:
            self.num_anomalies += 1
            info.anomaly_detected = True
        self.add_note(info, kind, sentence)

    def add_note(self, info: DebugInfo, kind: str, sentence: str) -> None:
        """Store and report a problem, or with the kind "cause" the cause of the last anomaly."""
        if sentence not in info.notes:
            info.notes.append(sentence)
        stored = self.other_notes if kind in ("slow", "memory growth") else self.anomalies
        text = f"{info.operation} {info.number}: {sentence}"
        if len(stored) < MAX_NOTES:
            stored.append(text)
        if kind != "cause":
            self.events.append((info.number, kind))
        self._report(kind, text)
