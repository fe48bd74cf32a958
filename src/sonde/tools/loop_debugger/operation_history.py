"""The history of a loop's operations, bounded in memory, and what is out of the ordinary in it.

Nothing is compared with a fixed number of bytes or seconds: an operation is slow beside its own usual time, a loss leaps beside its own
scatter, and memory leaks where it grows at every step for a share of what it was.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sonde.memory_trend import Growth, Trend
from sonde.rules.words import number
from sonde.spike_detection import Losses, Norms, Recent
from sonde.tools.loop_debugger.debug_info import DebugInfo

KEPT = 10_000  # operations; all are counted
KEPT_TIMES = 1000  # of one operation, for its spread
SLOW = math.log(2.5)  # times the usual: on a busy machine single operations are slower too
SLOW_SPREADS = 4.0  # and so many times farther from the median than the high values of the recent past
MATTERS = 0.5  # of the usual time of the operation around: what is lost beyond the usual must be that much
LEAK = 0.05  # of the memory at first: what an allocator takes in a short run is less
LOOK = 16  # measurements between two looks at the trend of memory


class _Times(Recent):
    """Of the logarithm of a time."""

    __slots__ = ()

    def _bound(self) -> float:
        return self.median + max(SLOW_SPREADS * (self.high - self.median), SLOW)


@dataclass(slots=True)
class Operation:
    """All calls of one name within one other."""

    name: str
    inside: str
    calls: int = 0
    total_s: float = 0.0
    num_errors: int = 0
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))
    usual: _Times = field(default_factory=_Times)


class Memory:
    """One kind of memory, MiB."""

    __slots__ = ("_growth", "_num", "first", "last", "peak", "total", "trend")

    def __init__(self) -> None:
        self._growth = Growth()
        self._num = 0
        self.first = self.last = self.peak = self.total = math.nan
        self.trend: Trend | None = None

    def see(self, used: float) -> bool:
        """Answers whether it leaks, as far as is known."""
        if not self._num:
            self.first = self.peak = used
            self.total = 0.0
        self._num += 1
        self.last, self.peak, self.total = used, max(self.peak, used), self.total + used
        self._growth.see(self._num, used)
        if not self._num % LOOK:
            self.trend = self._growth.trend(LEAK * max(self.first, 1.0))
        return self.trend is not None

    @property
    def num(self) -> int:
        return self._num

    @property
    def mean(self) -> float | None:
        return self.total / self._num if self._num else None


class Book:
    """Takes each operation when it is over, and judges it by those before."""

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        self._tell = tell  # (kind, sentence): something was detected
        self.infos: deque[DebugInfo] = deque(maxlen=KEPT)
        self.operations: dict[tuple[str, str], Operation] = {}
        self.memory, self.gpu = Memory(), Memory()
        self.num = 0
        self.counts = dict.fromkeys(("anomaly", "leak", "slow"), 0)
        self._losses, self._norms = Losses(), Norms()

    def number_of(self, name: str, inside: str) -> int:
        known = self.operations.get((name, inside))
        return known.calls if known else 0

    def add(self, info: DebugInfo, *, worked_s: float | None = None, numbers_judged: bool = False) -> None:
        """Judge and keep. `worked_s` is how long it had a processor, where other programs took that away in between;
        `numbers_judged`: its loss and norm are those of an operation inside, which was judged already."""
        self.num += 1
        operation = self.operations.setdefault((info.operation, info.inside), Operation(info.operation, info.inside))
        operation.calls += 1
        operation.num_errors += bool(info.error)
        took = info.execution_time
        if took is not None:
            operation.total_s += took
            operation.times_s.append(took)
            if took > 0 and not info.error:
                self._judge_time(info, operation, took, worked_s)
        if not numbers_judged:
            self._judge_numbers(info)
        if not info.inside:
            self._judge_memory(info)
        self.infos.append(info)

    def _judge_time(self, info: DebugInfo, operation: Operation, took: float, worked_s: float | None) -> None:
        slow = operation.usual.see(math.log(took))
        if slow is None or (worked_s is not None and math.log(max(worked_s, 1e-9)) <= slow.bound):
            return  # usual, or slow because another program had the processor
        around = next((one.usual.median for one in self.operations.values() if one.name == info.inside and one.usual.num), -math.inf)
        usual = math.exp(slow.usual)
        if took - usual >= MATTERS * math.exp(around):
            info.performance_issue_detected = True
            self._note(info, "slow", f"{info.operation} took {number(took * 1e3)} ms, usually about {number(usual * 1e3)} ms")

    def _judge_numbers(self, info: DebugInfo) -> None:
        for value, usual, what in ((info.loss, self._losses, "loss"), (info.gradient_norm, self._norms, "gradient norm")):
            if value is None:
                continue
            if not math.isfinite(value):
                self.note(info, f"the {what} is {number(value)}")
                continue
            is_norm = usual is self._norms
            if is_norm and value <= 0:
                continue
            leap = usual.see(math.log(value) if is_norm else value)
            if leap is not None:
                before = math.exp(leap.usual) if is_norm else leap.usual
                self.note(info, f"the {what} leapt to {number(value)} from about {number(before)}")

    def _judge_memory(self, info: DebugInfo) -> None:
        for used, memory, what in ((info.memory_usage, self.memory, "memory"), (info.gpu_memory, self.gpu, "GPU memory")):
            if used is None:
                continue
            known = memory.trend is not None
            if memory.see(used) and memory.trend is not None:
                info.memory_leak_detected = True
                trend = memory.trend
                rate, first, last = map(number, (trend.per_step, trend.first, trend.last))
                said = f"{what} grows by {rate} MiB with every operation: {first}, now {last} MiB"
                if not known:
                    self._note(info, "leak", said)

    def note(self, info: DebugInfo, sentence: str) -> None:
        """Something that whoever did the work has seen."""
        info.anomaly_detected = True
        self._note(info, "anomaly", sentence)

    def _note(self, info: DebugInfo, kind: str, sentence: str) -> None:
        self.counts[kind] += 1
        if sentence not in info.notes:
            info.notes.append(sentence)
        self._tell(kind, f"{info.operation} {info.number}: {sentence}")
