"""The x-ray: now and then one step is looked at closely, to see which lines and layers its time goes to.

It may cost as much as the step itself, so it is rare: the first after 0.4 s of training (20 s where steps are tiny), the next ones after
twice the time each, or later where the last one was expensive. Where slow steps come at equal distances, the next of them is looked at as
well. What it found is one event. Its own time is part of what Sonde is said to cost. Where tensors went from one device to another, the
next step is listened to as well, for those alone.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from time import perf_counter_ns, thread_time_ns
from typing import Any

from sonde.capture.error_isolation import Faults
from sonde.capture.model_registry import Models
from sonde.capture.phase_timer import Phases
from sonde.capture.recorder import Journal
from sonde.capture.standins import Desk
from sonde.capture.step_profiler.cpu_usage import Machine
from sonde.capture.step_profiler.device_transfers import Transfers
from sonde.capture.step_profiler.layer_times import LayerTimes
from sonde.capture.step_profiler.line_times import LineTimes
from sonde.capture.step_profiler.sync_points import SyncPoints
from sonde.config import Measured

FIRST_NS = 400_000_000  # of training: what is over sooner is not worth making faster
LIGHT_NS = 4_000_000  # a step that is shorter: of so small a model only …
LONG_NS = 20_000_000_000  # … a run that is longer than this is worth it
SHARE = 0.01  # of the time trained since the last one that it may cost
PUT_OFF = 8  # steps at most, for one that is not observed: where observing is cheap, all of them are
SETTLED = 8  # steps: before that caches fill and memory is first asked for
SLOW = 2.5  # times the usual step: noise of a busy machine is mostly below
SLOW_NS = 2_000_000  # and so much longer: less cannot be seen by anybody
MEMORY = 0.9  # of the running average of the usual step
MAX_SLOW = 6  # slow steps that are looked at in one run: they are alike

_PLACE = ("xray", "")


class StepProfiler:
    __slots__ = ("__dict__", "__weakref__", "_every", "_expected", "_trained_ns", "_usual_ns", "_wanted", "active", "due_ns", "long_ns")

    def __init__(self, journal: Journal, models: Models, desk: Desk, phases: Phases, faults: Faults, measured: Measured) -> None:
        self._journal, self._models, self._desk, self._phases, self._faults = journal, models, desk, phases, faults
        self._lines, self._waits, self._layers, self._machine = LineTimes(desk), SyncPoints(), LayerTimes(desk), Machine()
        self._transfers = Transfers(desk, models)
        self._wanted, self._every = measured.lines, measured.lines_every
        self._is_asked = False
        self.active = False
        self._looks = False  # at all of the step; else, while active, only its transfers are listened to
        self.compiles = False  # torch.compile guards on what is patched here, and would compile again
        self.due_ns, self.long_ns = FIRST_NS, LONG_NS  # after so much training
        self._num_put_off = 0
        self._trained_ns = 0
        self._usual_ns: float = 0.0
        self._slow: deque[int] = deque(maxlen=16)  # the last steps that were
        self._expected = -1
        self._num_slow = 0
        self._why = ""
        self._fetch_ns = self._fetch_cpu_ns = 0

    # -- when --------------------------------------------------------------------------------------

    def step_begins(self, step: int, last_ns: int, observed: bool) -> None:
        """On every step: how long the one before took, without what was Sonde's, and whether this one is busy being observed."""
        if not self._wanted:
            return
        self._trained_ns += last_ns
        if self._every is not None:
            self._is_asked = self._is_asked or step % self._every == 0
            if self._is_asked and not self._puts_off(observed):
                self._is_asked = False
                self._begin("asked")
            return
        if step <= SETTLED:
            self._usual_ns = last_ns
            return
        if last_ns > SLOW * self._usual_ns + SLOW_NS:
            self._expect(step - 1)
        else:
            self._usual_ns += (1 - MEMORY) * (last_ns - self._usual_ns)
        if self._trained_ns >= self.due_ns:
            if (self._usual_ns >= LIGHT_NS or self._trained_ns >= self.long_ns) and not self._puts_off(observed):
                self._begin("")
        elif step == self._expected and self._num_slow < MAX_SLOW and self._trained_ns > FIRST_NS:
            self._num_slow += 1
            self._begin("slow")

    def _puts_off(self, observed: bool) -> bool:
        """A look is due: does it wait for a step that is not busy being observed?"""
        self._num_put_off = self._num_put_off + 1 if observed and self._num_put_off < PUT_OFF else 0
        return self._num_put_off > 0

    def _expect(self, slow: int) -> None:
        """Three slow steps at equal distances, whatever comes between them: the fourth is expected."""
        for earlier in reversed(self._slow):
            if slow - earlier > 1 and 2 * earlier - slow in self._slow:
                self._expected = 2 * slow - earlier
                break
        self._slow.append(slow)

    # -- one step ----------------------------------------------------------------------------------

    def _begin(self, why: str) -> None:
        self.due_ns = 2 * self._trained_ns
        if self.compiles or _PLACE in self._faults.retired or any(watched.compiled for watched in self._models):
            return
        self._why = why
        self._fetch_ns = self._fetch_cpu_ns = 0
        self.active = self._looks = True
        try:
            self._phases.on_change = self._phase_changes
            self._transfers.start()  # first, since they may stay longer and both listen to .cpu()
            self._waits.start()
            for watched in self._models:
                self._layers.put_on(watched)
            self._lines.start()
        except Exception as error:
            self._failed(error)

    def _phase_changes(self, phase: str, begins: bool) -> None:
        if begins:
            self._lines.go_on()
        if phase == "data":  # does it compute, or wait for a disk or another process?
            sign = -1 if begins else 1
            self._fetch_ns += sign * perf_counter_ns()
            self._fetch_cpu_ns += sign * thread_time_ns()

    def step_ends(self, step: int) -> None:
        """Writes what was seen, where there was something."""
        if not self.active:
            return
        try:
            looked, moved = self._looks, self._transfers.num
            if looked:
                self._write_look(step)
            transfers = self._transfers.turn()
            if transfers is not None:
                self._journal.event("transfers", step, transfers=[_rounded(transfer._asdict()) for transfer in transfers])
            self._leave()
            if looked and moved:
                self.active = True
            else:
                self._transfers.stop()
        except Exception as error:
            self._failed(error)

    def _write_look(self, step: int) -> None:
        own_ns = self._desk.own_ns
        lines, waits, layers = self._lines.stop(), self._waits.stop(), self._layers.stop()
        self._journal.event(
            "xray", step, why=self._why, lines=[_rounded(line._asdict()) for line in lines if line.ms >= 0.001],
            waits=[_rounded(wait._asdict()) for wait in waits], layers=[_rounded(layer._asdict()) for layer in layers],
            num_transfers=self._transfers.num, machine=self._machine.since(), fetch_ms=round(self._fetch_ns / 1e6, 3),
            fetch_cpu_ms=round(self._fetch_cpu_ns / 1e6, 3),
        )  # fmt: skip
        self.due_ns = max(self.due_ns, self._trained_ns + int(own_ns / SHARE))

    def give_up(self) -> None:
        """Nothing of it stays, whatever became of the step."""
        if self.active:
            with ExitStack() as stack:
                stack.callback(self._leave)
                for part in (self._transfers, self._waits, self._layers, self._lines):  # the last one first
                    stack.callback(part.stop)

    def _leave(self) -> None:
        self.active = self._looks = False
        self._phases.on_change = None

    def _failed(self, error: Exception) -> None:
        self.give_up()
        self._faults.caught(*_PLACE, error)


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}
