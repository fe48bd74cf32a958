"""Where a step's time goes, by a monotonic clock; what Sonde itself takes is kept apart."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

from sonde.capture.journal import Journal

_SCALARS = {phase: f"{phase}_ms" for phase in ("data", "forward", "backward", "optimizer")}


class Phases:
    def __init__(self, journal: Journal, own_ns: Callable[[], int]) -> None:
        self._journal = journal
        self._own_ns = own_ns  # Sonde's time in the step under way, up to now
        self._began: dict[str, tuple[int, int]] = {}
        self._step_began = 0

    def begin(self, phase: str) -> None:
        self._began[phase] = (perf_counter_ns(), self._own_ns())

    def finish(self, phase: str) -> None:
        began = self._began.pop(phase, None)
        if began is not None:
            own_ns = self._own_ns() - began[1]  # our hooks inside the phase are not the phase's
            self._journal.add(_SCALARS[phase], max(0, perf_counter_ns() - began[0] - own_ns) / 1e6)

    def touch(self) -> None:
        """The first step begins with the first call that belongs to a training, not when the script starts."""
        if not self._step_began:
            self._step_began = perf_counter_ns()

    def begin_step(self, now: int) -> None:
        self._began.clear()
        self._step_began = now

    def write(self, now: int, own_ns: int) -> int:
        """Writes the step's times; answers with its length."""
        step_ns = now - self._step_began if self._step_began else 0
        get = self._journal.get
        known_ms = get("data_ms") + get("forward_ms") + get("backward_ms") + get("optimizer_ms")
        self._journal.set("step_ms", step_ns / 1e6)
        self._journal.set("sonde_ms", own_ns / 1e6)
        self._journal.set("other_ms", max(0.0, (step_ns - own_ns) / 1e6 - known_ms))
        return step_ns
