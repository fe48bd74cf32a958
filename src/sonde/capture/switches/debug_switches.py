"""The switches of a session: which are on, since when, and what they have cost. They are turned on between two steps, never inside of one.

All off, a step pays for one comparison of the clock; twice a second the file is read through which they are switched from outside.
"""

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch

from sonde.capture.detect_step_end import StepBoundaries
from sonde.capture.probes.probe import Probe, ProbeContext
from sonde.capture.switches.facts_for_switches import StepFacts
from sonde.capture.switches.rate_limited_log import SwitchLog
from sonde.capture.switches.switch_log_output import UNCHANGED, SwitchOutput
from sonde.capture.switches.torch_profiler_switch import PLAIN, TENSORBOARD, TorchProfilerRun
from sonde.config import DebugConfig
from sonde.events import SwitchChanged, TypedEvent, encode
from sonde.runlog.switch_file import SWITCHES, SWITCHES_FILE, check_switch_names, read_switch_requests

FILE_INTERVAL_NS = 500_000_000  # between two reads of the file
MAX_RECORDED = 10_000  # changes that are written into a run
ANOMALY = "autograd_anomaly"
URGENT = ("lr_scheduling",)  # switches whose changes are written whatever the number of lines per second
_PROFILERS = (PLAIN, TENSORBOARD)

_log = logging.getLogger("sonde")


@dataclass(slots=True)
class SwitchState:
    """One switch."""

    since_step: int | None = None  # None: it is off
    by: str = ""  # who turned it on
    cost_ns: int = 0  # in Sonde's own code, over the whole run
    num_lines: int = 0
    log: SwitchLog = field(kw_only=True)


class Switches:
    """The thirteen switches of a session; `attach` connects them to a training."""

    def __init__(self, config: DebugConfig) -> None:
        self._config = config
        self._states = {name: SwitchState(log=SwitchLog(name, as_json=config.log_json)) for name in SWITCHES}
        self._requested = dict.fromkeys(config.switches, (True, "config"))  # changes that wait for the end of a step, and by whom
        self.names_on: tuple[str, ...] = ()
        self.facts = StepFacts()
        self._context: ProbeContext | None = None
        self._anomaly_before: tuple[bool, bool] | None = None  # torch's anomaly mode as the user had it
        self._file_stamp: tuple[int, int, int] | None = None
        self._next_read_ns = 0
        self._has_warned = False
        self._num_recorded = 0

    def attach(self, context: ProbeContext, boundaries: StepBoundaries, directory: Path, on_change: Callable[[], None]) -> None:
        """A session has started; `on_change` is called when switches have changed."""
        self._context, self._boundaries, self._directory, self._on_change = context, boundaries, directory, on_change
        self.output, self._profiler = SwitchOutput(context, self.facts), TorchProfilerRun(directory)
        self._file = str(directory / SWITCHES_FILE)
        self._file_stamp = self._read_stamp()  # wishes of an earlier process are not repeated
        self._memory_every = self._config.measured.memory_every
        if self._config.measured.anything:
            self._apply(0)

    def request(self, names: str | Iterable[str] | None, on: bool, by: str) -> None:
        """Change switches: now where no training step is under way, else when it ends."""
        for name in SWITCHES if names is None else check_switch_names(names):
            self._requested[name] = (on, by)
        if self._context is not None and not self._is_training(self._context):
            self._apply(self._boundaries.number)

    def turn_off(self, names: str | Iterable[str] | None, by: str) -> None:
        """Turn switches off at once, also inside of a step."""
        self.request(names, False, by)
        if self._context is not None and self._requested:
            waiting = {name: change for name, change in self._requested.items() if change[0]}
            self._requested = {name: change for name, change in self._requested.items() if not change[0]}
            self._apply(self._boundaries.number)
            self._requested |= waiting

    def _is_training(self, context: ProbeContext) -> bool:
        """Whether a step has begun to train: fetching a batch and evaluating do not count."""
        scalars = context.state.scalars
        return self._boundaries.is_active and scalars["forwards"] + scalars["backwards"] + scalars["optimizer_steps"] > 0

    def is_on(self, name: str) -> bool:
        """Whether a switch is on, or will be when the step ends."""
        requested = self._requested.get(name)
        return requested[0] if requested is not None else self._states[name].since_step is not None

    def status(self) -> dict[str, dict[str, Any]]:
        """For each switch: whether it is on, since when and by whom, its cost and its number of lines."""
        return {
            name: {
                "on": state.since_step is not None, "since_step": state.since_step, "by": state.by,
                "cost_ms": round(state.cost_ns / 1e6, 3), "num_lines": state.num_lines,
            }
            for name, state in self._states.items()
        }  # fmt: skip

    def on_step_end(self, step: int) -> None:
        context = self._context
        if context is None:
            return
        now_ns = context.timer.entered_ns
        if not self.names_on and not self._requested and now_ns < self._next_read_ns and self._memory_every is None:
            return  # all off
        for name in self.names_on:
            self._isolate(name, partial(self._report, name, step, now_ns))
        self.facts.end_step()
        if self._memory_every is not None and step % self._memory_every == 0:
            self._isolate("memory_usage", self.output.record_memory)
        if now_ns >= self._next_read_ns:
            self._next_read_ns = now_ns + FILE_INTERVAL_NS
            self._read_file()
        if self._requested:
            self._apply(step + 1)
        if self._profiler.active or PLAIN in self.names_on or TENSORBOARD in self.names_on:
            self._isolate(PLAIN if PLAIN in self.names_on else TENSORBOARD, lambda: self._profile(step, now_ns))

    def _report(self, name: str, step: int, now_ns: int) -> None:
        make = self.output.reports.get(name)
        if make is not None and (report := make(step)) is not None:
            self._write(name, step, report, now_ns)

    def _write(self, name: str, step: int, report: dict[str, Any], now_ns: int) -> None:
        state = self._states[name]
        state.num_lines += state.log.write(step, report, now_ns, name in URGENT and report.get("changed") != UNCHANGED)

    def _isolate(self, name: str, work: Callable[[], object]) -> None:
        """Run the work of a switch and count its cost; one that fails is turned off, and training goes on."""
        began = perf_counter_ns()
        try:
            work()
        except Exception as error:
            self._requested[name] = (False, "an error")
            if self._context is not None:
                self._context.isolation.report(f"switch {name}", "", error)
        finally:
            self._states[name].cost_ns += perf_counter_ns() - began

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            facts = os.stat(self._file, follow_symlinks=False)
        except OSError:
            return None
        return facts.st_mtime_ns, facts.st_ino, facts.st_size

    def _read_file(self) -> None:
        stamp = self._read_stamp()
        if stamp == self._file_stamp:
            return
        self._file_stamp = stamp
        try:
            for name, on in read_switch_requests(self._directory).items():
                if on is not self.is_on(name):
                    self._requested[name] = (on, "sonde switch")
        except ValueError as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("sonde: %s is ignored: %s.", SWITCHES_FILE, error)

    def _apply(self, step: int) -> None:
        """`step` is the first that they hold for."""
        requested, self._requested = self._requested, {}
        for name, (on, by) in requested.items():
            if on is not (self._states[name].since_step is not None):
                self._isolate(name, partial(self._switch, name, on, by, step))
        if requested:
            self.names_on = tuple(name for name, state in self._states.items() if state.since_step is not None)
            self._on_change()

    def _switch(self, name: str, on: bool, by: str, step: int) -> None:
        state = self._states[name]
        if on:
            state.since_step, state.by = step, by
            state.log.open(at_once=not by.startswith("when "))  # a condition may turn it on and off many times per second
            if name == "validation":
                self.facts.end_step()  # of an evaluation only the end would be counted
            if name == ANOMALY:
                self._enable_anomaly_mode()
        else:
            state.since_step, state.by = None, ""
            if name == ANOMALY:
                self._restore_anomaly_mode()
            if name in _PROFILERS and self._profiler.active:
                self._finish_profile(step - 1, perf_counter_ns())
            state.log.close()
        if self._num_recorded < MAX_RECORDED:
            self._num_recorded += 1
            self._emit(SwitchChanged(switch=name, is_on=on, by=by), step)

    def _enable_anomaly_mode(self) -> None:
        # Nothing is raised for a NaN that backward would have passed on, unless the user wants the training to stop at it.
        self._anomaly_before = (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
        torch.autograd.set_detect_anomaly(True, check_nan=self._own_anomaly_mode()[1])

    def _restore_anomaly_mode(self) -> None:
        before, self._anomaly_before = self._anomaly_before, None
        if before is not None and (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) == self._own_anomaly_mode(before):
            torch.autograd.set_detect_anomaly(*before)  # else the user has changed it since, and means that

    def _own_anomaly_mode(self, before: tuple[bool, bool] | None = None) -> tuple[bool, bool]:
        was_on, checked = before or self._anomaly_before or (False, False)
        return True, (was_on and checked) or self._config.anomaly_detection_mode == "raise"

    def _profile(self, step: int, now_ns: int) -> None:
        wanted = tuple(name for name in _PROFILERS if name in self.names_on)
        if not self._profiler.active:
            self._profiler.start(wanted, step + 1)
        elif self._profiler.on_step_end() or not wanted:
            self._finish_profile(step, now_ns)
            for name in wanted:
                self._requested[name] = (False, "profile written")
            self._apply(step + 1)

    def _finish_profile(self, step: int, now_ns: int) -> None:
        event = self._profiler.stop()
        if event is not None:
            self._emit(event, step)
            for name in self._profiler.requested_by:
                self._write(name, step, encode(event)[1], now_ns)

    def close(self) -> None:
        """All off: torch's modes and the levels of loggers are restored, profiles are written. What happened after the last step is
        reported."""
        if self._context is None:
            return
        step = self._boundaries.number
        for name in self.names_on:
            if name in self.output.last_reports:
                self._isolate(name, partial(self._report_last, name, step))
        self._requested = dict.fromkeys(SWITCHES, (False, "the end"))
        self._apply(self._boundaries.number)
        self._context = None

    def _report_last(self, name: str, step: int) -> None:
        report = self.output.last_reports[name](step)
        if report is not None:
            self._write(name, step, report, perf_counter_ns())

    def _emit(self, event: TypedEvent, step: int) -> None:
        if self._context is not None:
            self._context.recorder.emit(event, step)


class SwitchProbe(Probe):
    """Runs the switches between two steps."""

    name = "switches"

    def __init__(self, context: ProbeContext, switches: Switches) -> None:
        super().__init__(context)
        self._switches = switches

    def on_loader_start(self, loader: Any) -> None:
        self._switches.facts.on_loader_start(loader)

    def on_scheduler_created(self, scheduler: Any) -> None:
        self._switches.facts.on_scheduler(scheduler)

    def on_step_timed(self, training_ns: int) -> None:
        self._switches.on_step_end(self._state.number)
