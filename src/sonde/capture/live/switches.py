"""The switches of a session: what is on, since when, and what it has cost. They are flipped between two steps and never inside of one.

All off, a step pays for one comparison of the clock; twice a second the file is looked at through which they are flipped from outside.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch

from sonde.capture.error_isolation import Faults
from sonde.capture.live.switch_log import LogLines
from sonde.capture.live.switch_output import SwitchOutput
from sonde.capture.live.torch_profiler import PLAIN, TENSORBOARD, Tracing
from sonde.capture.recorder import Journal
from sonde.capture.step_tracker import Loop
from sonde.config import DebugConfig
from sonde.runlog.switch_file import SWITCHES, WISHES, known, read_wishes

LOOK_NS = 500_000_000  # between two looks at the file
MAX_TOLD = 10_000  # flips that are written into a run
ANOMALY = "autograd_anomaly"
_TRACED = (PLAIN, TENSORBOARD)

_log = logging.getLogger("sonde")


@dataclass(slots=True)
class State:
    """One switch."""

    since_step: int | None = None  # None: it is off
    by: str = ""  # who turned it on
    cost_ns: int = 0  # in Sonde's own code, over the whole run
    num_lines: int = 0
    lines: LogLines = field(kw_only=True)


class Switches:
    def __init__(self, config: DebugConfig) -> None:
        self._config = config
        self._states = {name: State(lines=LogLines(name, as_json=config.log_json)) for name in SWITCHES}
        self._asked: dict[str, tuple[bool, str]] = {}  # flips that wait for the end of a step
        self._on: tuple[str, ...] = ()  # those that tell something of every step
        self._loop: Loop | None = None
        self._anomaly: tuple[bool, bool] | None = None  # torch's mode as the user had it
        self._seen: tuple[int, int, int] | None = None  # the file, as it was last
        self._next_look_ns = 0
        self._warned = False
        self._num_told = 0
        self.also: list[Callable[[int, int], None]] = []  # what else is done between two steps: metrics and conditions

    def connect(self, loop: Loop, journal: Journal, faults: Faults, directory: Path) -> None:
        """A session has started."""
        self._loop, self._journal, self._faults, self._directory = loop, journal, faults, directory
        self.tellers, self._tracing = SwitchOutput(loop, journal), Tracing(directory)
        self._file = str(directory / WISHES)
        self._seen = self._stamp()  # wishes of an earlier process are not repeated
        self._memory_every = self._config.measured.memory_every
        if self._config.measured.anything:
            loop.between_steps = self.step_ended
            self._apply(0)

    # -- asked ---------------------------------------------------------------------------------------

    def ask(self, names: str | Iterable[str] | None, on: bool, by: str) -> None:
        """Flips switches: now where no step is under way, else when it ends."""
        for name in SWITCHES if names is None else known(names):
            self._asked[name] = (on, by)
        if self._loop is not None:
            self._loop.quiet_until_ns = 0
            if not self._loop.clock.active and not self._loop.deaf:
                self._apply(self._loop.clock.number)

    def is_on(self, name: str) -> bool:
        """Or will be, when the step ends."""
        asked = self._asked.get(name)
        return asked[0] if asked is not None else self._states[name].since_step is not None

    def status(self) -> dict[str, dict[str, Any]]:
        return {
            name: {
                "on": state.since_step is not None, "since_step": state.since_step, "by": state.by,
                "cost_ms": round(state.cost_ns / 1e6, 3), "num_lines": state.num_lines,
            }
            for name, state in self._states.items()
        }  # fmt: skip

    # -- between two steps -----------------------------------------------------------------------------

    def step_ended(self, step: int, training_ns: int) -> None:
        """`training_ns`: what the step took, without Sonde."""
        loop = self._loop
        if loop is None:
            return
        now_ns = loop._phases.entered_ns  # read just now
        for name in self._on:
            self._contained(name, lambda name=name: self._tell(name, step, now_ns))  # type: ignore[misc]
        for each in self.also:
            each(step, training_ns)
        if self._memory_every is not None and step % self._memory_every == 0:
            self._contained("memory_usage", self.tellers.take_account)
        if now_ns >= self._next_look_ns:
            self._next_look_ns = now_ns + LOOK_NS
            self._look()
        if self._asked:
            self._apply(step + 1)
        if self._tracing.active or self._wants_trace():
            self._contained(PLAIN if PLAIN in self._on else TENSORBOARD, lambda: self._trace(step, now_ns))
        busy = self._on or self.also or self._asked or self._memory_every is not None or self._tracing.active
        loop.quiet_until_ns = 0 if busy else self._next_look_ns

    def _tell(self, name: str, step: int, now_ns: int) -> None:
        if name in _TRACED or name == ANOMALY:
            return
        told = self.tellers[name](step)
        state = self._states[name]
        if told is not None:
            state.num_lines += state.lines.say(step, told, now_ns)

    def _contained(self, name: str, work: Callable[[], object]) -> None:
        """What it costs is counted; a switch that fails is turned off, and training goes on."""
        began = perf_counter_ns()
        try:
            work()
        except Exception as error:
            self._asked[name] = (False, "an error")
            self._faults.caught(f"switch {name}", "", error)
        finally:
            self._states[name].cost_ns += perf_counter_ns() - began

    # -- the file --------------------------------------------------------------------------------------

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            facts = os.stat(self._file, follow_symlinks=False)
        except OSError:
            return None
        return facts.st_mtime_ns, facts.st_ino, facts.st_size

    def _look(self) -> None:
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            for name, on in read_wishes(self._directory).items():
                if on is not self.is_on(name):
                    self._asked[name] = (on, "sonde switch")
        except ValueError as error:
            if not self._warned:
                self._warned = True
                _log.warning("sonde: %s is ignored: %s.", WISHES, error)

    # -- on and off ------------------------------------------------------------------------------------

    def _apply(self, step: int) -> None:
        """`step` is the first that they hold for."""
        asked, self._asked = self._asked, {}
        for name, (on, by) in asked.items():
            state = self._states[name]
            if on is (state.since_step is not None):
                continue
            self._contained(name, lambda name=name, on=on, by=by: self._flip(name, on, by, step))  # type: ignore[misc]
        self._on = tuple(name for name, state in self._states.items() if state.since_step is not None)

    def _flip(self, name: str, on: bool, by: str, step: int) -> None:
        state = self._states[name]
        if on:
            state.since_step, state.by = step, by
            state.lines.open()
            if name == ANOMALY:
                self._watch_anomalies()
        else:
            state.since_step, state.by = None, ""
            if name == ANOMALY:
                self._leave_anomalies()
            if name in _TRACED and self._tracing.active:
                self._finish_trace(step - 1, perf_counter_ns())
            state.lines.close()
        if self._num_told < MAX_TOLD:
            self._num_told += 1
            self._journal.event("switch", step, switch=name, on=on, by=by)

    def _watch_anomalies(self) -> None:
        # Nothing is raised for a NaN that backward would have passed on, unless the user wants the training to stop at it.
        self._anomaly = (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
        torch.autograd.set_detect_anomaly(True, check_nan=self._ours()[1])

    def _leave_anomalies(self) -> None:
        before, self._anomaly = self._anomaly, None
        if before is not None and (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) == self._ours(before):
            torch.autograd.set_detect_anomaly(*before)  # else the user has changed it since, and means that

    def _ours(self, before: tuple[bool, bool] | None = None) -> tuple[bool, bool]:
        was_on, checked = before or self._anomaly or (False, False)
        return True, (was_on and checked) or self._config.anomaly_detection_mode == "raise"

    # -- profiles --------------------------------------------------------------------------------------

    def _wants_trace(self) -> bool:
        return PLAIN in self._on or TENSORBOARD in self._on

    def _trace(self, step: int, now_ns: int) -> None:
        wanted = tuple(name for name in _TRACED if name in self._on)
        if not self._tracing.active:
            self._tracing.begin(wanted, step + 1)
        elif self._tracing.step_ended() or not wanted:
            self._finish_trace(step, now_ns)
            for name in wanted:
                self._asked[name] = (False, "profile written")
            self._apply(step + 1)

    def _finish_trace(self, step: int, now_ns: int) -> None:
        found = self._tracing.end()
        if found is None:
            return
        self._journal.event("profile", step, **found)
        for name in self._tracing.asked_by:
            state = self._states[name]
            state.num_lines += state.lines.say(step, found, now_ns)

    # -- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """All off: torch's modes and the loggers' levels are as they were, profiles are written."""
        if self._loop is None:
            return
        for name in SWITCHES:
            self._asked[name] = (False, "the end")
        self._apply(self._loop.clock.number)
        self._loop.between_steps = lambda step, training_ns: None
        self._loop = None
