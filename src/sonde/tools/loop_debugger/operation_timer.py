"""The clock of an operation that runs."""

from __future__ import annotations

from time import perf_counter_ns, thread_time_ns

from sonde.profiler.utilization import num_preemptions
from sonde.tools.loop_debugger.loop_operation_record import DebugInfo
from sonde.tools.loop_debugger.measure_loop_operation import synchronize_devices


class RunningOperation:
    """Times an operation from `start_clock` to `stop_clock`, without Sonde's work for the operations inside."""

    __slots__ = ("_entered_ns", "_preemptions", "_start_ns", "_stop_ns", "_thread_ns", "excluded_ns", "info", "is_checked", "statistics")

    def __init__(self, info: DebugInfo, entered_ns: int) -> None:
        self.info = info
        self.excluded_ns = 0
        self.is_checked = False  # loss and gradient norm are checked already, here or in an operation inside
        self.statistics: dict[str, dict[str, float]] = {}
        self._entered_ns = entered_ns
        self._start_ns = self._stop_ns = self._thread_ns = self._preemptions = 0

    def start_clock(self) -> None:
        """The work starts now. A later call replaces an earlier one."""
        synchronize_devices()
        self._preemptions, self._thread_ns = -num_preemptions(), -thread_time_ns()
        self._start_ns = perf_counter_ns()

    def stop_clock(self) -> None:
        """The work is done, on devices too. The first call counts."""
        if not self._stop_ns:
            synchronize_devices()
            self._stop_ns = perf_counter_ns()
            self._preemptions, self._thread_ns = self._preemptions + num_preemptions(), self._thread_ns + thread_time_ns()

    def seconds(self) -> float:
        """The time of the work, so far or in all."""
        return max(0, (self._stop_ns or perf_counter_ns()) - self._start_ns - self.excluded_ns) / 1e9

    def cpu_s(self) -> float | None:
        """The time of this thread on a processor, where other programs interrupted it; None where none did."""
        return self._thread_ns / 1e9 if self._preemptions else None

    def own_ns(self) -> int:
        """The time since the operation was entered that was not its work."""
        return perf_counter_ns() - self._entered_ns - round(self.seconds() * 1e9)
