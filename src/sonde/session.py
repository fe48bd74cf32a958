"""DebugSession: one watched training, from start to stop. `watch` is the one line that most people need."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sonde.config import DebugConfig, as_config, load_config
from sonde.errors import RunNotWritable, SondeError

try:
    _before_ns = perf_counter_ns()
    import torch

    TORCH_IMPORT_NS = perf_counter_ns() - _before_ns
except ImportError as error:
    raise SondeError(
        "watching a training needs torch, which is not installed here. Install it with: pip install torch\n"
        "Reading runs (sonde diagnose, sonde report) works without it."
    ) from error

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

import sonde
from sonde.capture import torch_patches
from sonde.capture.disable_failing_probes import ErrorIsolation
from sonde.capture.find_models_in_script import ModelDiscovery
from sonde.capture.logged_values import MAX_REFUSED, read_logged
from sonde.capture.probes.loss import LossProbe
from sonde.capture.probes.memory_usage import MemoryProbe
from sonde.capture.probes.probe import Probe, ProbeContext
from sonde.capture.run_log_recorder import StepRecorder
from sonde.capture.step_tracker import IncidentHandler, StepTracker
from sonde.capture.switches.conditional_switches import TriggerProbe, Triggers
from sonde.capture.switches.debug_switches import Switches, SwitchProbe
from sonde.capture.switches.facts_for_switches import SwitchFactsProbe
from sonde.capture.watched_model import join_path
from sonde.capture.watched_models_registry import ModelRegistry
from sonde.capture.zero_grad_tracking import optimizer_parameters
from sonde.early_stopper import EarlyStopping
from sonde.events import (
    STEP_SCALARS,
    ChildProcessesEnded,
    Ended,
    NonFinite,
    NotMeasured,
    ProbeDisabled,
    RecordedWithTool,
    Started,
    TextLogged,
    TypedEvent,
)  # fmt: skip
from sonde.formatting import counted
from sonde.runlog.fatal_signal_file import fatal_signals_recorded
from sonde.runlog.run_directory import new_run_directory, open_run_directory, write_run_json
from sonde.runlog.switch_file import check_switch_names
from sonde.runlog.writer import Writer
from sonde.script_runner import Script, run_to_end
from sonde.statistics import native_extension, reductions
from sonde.statistics.private_torch_api import is_compiled, without_modes
from sonde.statistics.tensor_statistics_table import measure_columns
from sonde.tools_of_session import SessionTool, SessionTools

if TYPE_CHECKING:
    from sonde.profiler.operation_report import OperationsReport
    from sonde.report import Report

OPERATIONS = "operations"  # folder in the run's directory
TRAINING_CHILD_S = 1.0  # processor time of child processes that have ended: importing torch takes as long
STALLED_S = 1.0  # a write that takes longer when a program ends is not waited for
MAX_TEXT = 10_000  # characters of a text that the user logs
MAX_BAD_PARAMETERS = 8  # with NaN or Inf at the end that are recorded: some may have Inf on purpose

_log = logging.getLogger("sonde")


class DebugSession:
    """Watches models while it is started; writes a run; `report()` judges it. Use as a context manager, or `start()` and `stop()`."""

    def __init__(
        self, config: DebugConfig | Mapping[str, Any] | None = None, *, to: str | Path | None = None, name: str | None = None,
        strict: bool = False,
    ) -> None:  # fmt: skip
        self.config = as_config(config) or load_config()
        self.strict = strict
        self.run: Path | None = None
        self._to, self._name = to, name
        self._models_to_watch: list[tuple[nn.Module, str]] = []
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._discovers_models = True  # watches whatever trains, unless models are attached
        self._concerned: dict[int, tuple[weakref.ref[Optimizer], bool]] = {}
        self.is_started = False
        self._startup_ns = 0
        self._written_records: dict[str, str] = {}  # by tool
        self._nonfinite_freed: list[tuple[NonFinite, int]] = []  # weights that were freed with a NaN, and the step
        self._refused: set[str] = set()  # names that were logged with something that is not one number
        self._tracker: StepTracker | None = None
        self.tools = SessionTools(self)
        self._switches = Switches(self.config)
        self._triggers = Triggers(self._switches, self)

    def attach(self, model: nn.Module, optimizer: Any = None, *, name: str = "model") -> Self:
        """Watch this model, and this optimizer (or a list of them), or all that hold its parameters."""
        if not isinstance(model, nn.Module):
            raise SondeError(
                f"watch needs a torch.nn.Module, not {type(model).__name__}. Pass the model itself, not its output or its parameters."
            )
        optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
        for each in optimizers:
            if not isinstance(each, Optimizer):
                raise SondeError(f"optimizer must be a torch.optim.Optimizer or a list of them, not {type(each).__name__}.")
        self._discovers_models = False
        self._models_to_watch.append((model, name))
        self._optimizers.extend(weakref.ref(each) for each in optimizers)
        self._concerned.clear()
        if self._tracker is not None:
            self._watch_attached(self._tracker)
        return self

    def start(self, **details: Any) -> Self:
        """Begin to watch. Everything that can fail, fails here, clearly; afterwards nothing reaches the training. `details` are written
        into the run."""
        if self.is_started:
            raise SondeError("this session was started already; a new run needs a new session.")
        self.is_started = True
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            # A spawned worker imports the script again: that is not a second training.
            _log.info("sonde: this process only re-imports the script; nothing is watched here.")
            return self
        began_ns = perf_counter_ns()
        rank, world_size = _rank()
        self.run = Path(os.path.abspath(self._open_run(world_size)))  # the script may change its directory
        manifest: dict[str, Any] = {
            "name": self._name or self.run.name, "argv": list(sys.argv), "sonde": sonde.__version__,
            "python": sys.version.split()[0], "torch": torch.__version__, "every": self.config.every,
            "mode": self.config.mode.value, "level": self.config.level.value, "overhead_budget": self.config.overhead_budget,
            "native_kernel": native_extension.ENABLED, "threads": torch.get_num_threads(), **self._recorded_settings(),
        }  # fmt: skip
        write_run_json(self.run, manifest | details)
        self._recorder = StepRecorder(Writer(self.run, rank=rank, world_size=world_size, manifest=manifest | details))
        has_native_kernel = manifest.pop("native_kernel")
        self._recorder.emit(Started(**manifest, has_native_kernel=has_native_kernel, extra=details), 0)
        self._isolation = ErrorIsolation(self._record_disabled, strict=self.strict)
        self._registry = ModelRegistry(self._recorder, self.config.layers)
        tracker = self._tracker = StepTracker(
            self._recorder, self.config, self._isolation, self._registry, concerns=self._concerns, make_handlers=self._make_handlers,
            more_probes=self._make_probes,
        )  # fmt: skip
        self._registry.connect(tracker, self._check_freed_weights)
        tracker.on_models_changed = self._attach_tools
        self._cpu_of_children_s = _cpu_of_children_s()
        self._switches.attach(tracker.context, tracker.boundaries, self.run, tracker.plan_handlers)
        self._discovery = ModelDiscovery(self._registry, tracker)
        self._watch_attached(tracker)
        self._registry.report_unmatched_layers(0)
        if self.config.measured.anything:
            torch_patches.subscribe(tracker)
            if self._discovers_models:
                self._discovery.start()
        else:
            tracker.is_paused = True  # torch is not patched
        self._recorder.flush()
        atexit.register(self._close_at_exit)
        self._startup_ns += perf_counter_ns() - began_ns
        return self

    def _recorded_settings(self) -> dict[str, Any]:
        """Settings that whoever reads the run needs, where they are not the defaults."""
        config = self.config
        settings = {
            "sampling_rate": config.sampling_rate if config.sampling_rate < 1 else None, "layers": list(config.layers) or None,
            "memory_threshold_mb": config.memory_threshold_mb, "memory_threshold_share": config.memory_threshold_share,
        }  # fmt: skip
        return {name: value for name, value in settings.items() if value is not None}

    def _open_run(self, world_size: int) -> Path:
        if self._to is not None:
            return open_run_directory(self._to)
        if world_size > 1:
            return open_run_directory(Path(self.config.output_dir) / f"{self._name or _script_name()}_{_job()}")
        return new_run_directory(Path(self.config.output_dir), self._name or _script_name())

    def stop(self) -> Report:
        """End watching and judge the run."""
        self.close()
        return self.report()

    def close(self, how: str = "finished", *, exit_code: int | None = 0, exception: str = "") -> None:
        """End watching: every hook and patch is removed and the run is closed. Closing twice is fine."""
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return
        atexit.unregister(self._close_at_exit)
        try:
            # Each of these is tried, whatever becomes of those before it: a hook that stays is worse than a run without its last event.
            with contextlib.ExitStack() as stack:
                if self.config.enable_visualization and self.run is not None:
                    stack.callback(self.tools.draw_plots, self.run, self._models_by_name())
                stack.callback(self._recorder.writer.close)
                stack.callback(self._recorder.flush)
                stack.callback(self._record_end, tracker, how, exit_code, exception)
                stack.callback(self._write_records, tracker.boundaries.number)
                stack.callback(self._registry.close)
                stack.callback(self.tools.close)
                stack.callback(self._record_children, tracker)
                stack.callback(self._record_nonfinite_parameters, tracker)
                stack.callback(self._discovery.stop)
                stack.callback(torch_patches.unsubscribe, tracker)
                stack.callback(tracker.pause)
                stack.callback(tracker.close_handlers)
                stack.callback(self._switches.close)
                if not self._recorder.writer.wait(STALLED_S):
                    _log.warning("sonde: the disk does not answer; the end of the run in %s is not written.", self.run)
                tracker.finish()
        except Exception as error:
            if self.strict:
                raise
            _log.warning("sonde: the run could not be closed properly (%s: %s).", type(error).__name__, error)

    def _record_end(self, tracker: StepTracker, how: str, exit_code: int | None, exception: str) -> None:
        ended = Ended(
            how=how, exit_code=exit_code, exception=exception, startup_ms=self._startup_ns / 1e6,
            num_incidents=tracker.num_incidents, incidents_ms=tracker.incidents_ns / 1e6,
        )  # fmt: skip
        self._recorder.emit(ended, tracker.boundaries.number)

    def _record_nonfinite_parameters(self, tracker: StepTracker) -> None:
        """The weights that the training leaves behind: the update of the last step, or what came after it, may have made them NaN."""
        if not tracker.boundaries.number:
            return
        named = {join_path(watched.name, path): p for watched in self._registry for path, p in watched.parameters()}
        step = max(tracker.boundaries.number - 1, 0)
        for event, last_step in self._nonfinite_freed or [(event, step) for event in _nonfinite_parameters(named)]:
            self._recorder.emit(event, last_step)

    def _check_freed_weights(self, model: str) -> None:
        """The program frees a model, for example because the function that trained it returns: its weights cannot be checked at the end.
        Python calls this at any line, so the finding waits for the end of the run."""
        tracker = self._tracker
        if tracker is None or not tracker.boundaries.number or len(self._nonfinite_freed) >= MAX_BAD_PARAMETERS:
            return
        with contextlib.suppress(Exception):  # Python would print it
            events = without_modes(_nonfinite_parameters, self._registry.measured_parameters(model), runs_users_dispatch=False)
            self._nonfinite_freed += [(event, max(tracker.boundaries.number - 1, 0)) for event in events]

    def _record_children(self, tracker: StepTracker) -> None:
        num_steps = self._recorder.writer.num_steps_of_children
        may_have_trained = not tracker.boundaries.number and _cpu_of_children_s() - self._cpu_of_children_s >= TRAINING_CHILD_S
        if num_steps or may_have_trained:
            self._recorder.emit(ChildProcessesEnded(num_steps=num_steps), tracker.boundaries.number)

    def record_exception(self, error: BaseException | None) -> None:
        """The training ends with this error: where memory ran out, what had filled it is recorded in the run."""
        tracker = self._tracker
        if tracker is None or error is None:
            return
        try:
            from sonde.incidents.out_of_memory_handler import explain_out_of_memory, find_out_of_memory

            cause = find_out_of_memory(error)
            if cause is not None:
                optimizers, memory = tracker.gradients.optimizers(), tracker.probe(MemoryProbe)
                outside_bytes = 0 if memory is None else memory.outside_bytes
                event = explain_out_of_memory(cause, self._models_by_name(), optimizers, tracker.buffer, outside_bytes)
                self._recorder.emit(event, tracker.boundaries.number)
        except Exception as failure:
            if self.strict:
                raise
            _log.warning("sonde: why memory ran out could not be found (%s: %s).", type(failure).__name__, failure)

    def describe_lost_records(self) -> str:
        """What could not be written and is not mentioned in the run either, as a sentence; "" where nothing is lost."""
        if self.run is None or not self.run.is_dir():
            return "" if self.run is None else f"the run in {self.run} was removed while the script ran"
        gap = self._recorder.writer.unwritten_gap
        since = f", from step {gap.first_step} on," if gap and gap.first_step >= 0 else ""
        return f"{counted(gap.num_dropped, 'record')} of this run{since} could not be written ({gap.reason})" if gap else ""

    def _close_at_exit(self) -> None:
        """The program ends and nobody has closed the session: what was recorded since the last step is written, and that it ended."""
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # set where an exception ends the program
        if error is None:
            self.close("exit", exit_code=None)  # the exit code is not known here
        else:
            self._close_after(error)

    def _close_after(self, error: BaseException) -> None:
        self.record_exception(error)
        self.close("exception", exit_code=1, exception=_exception_text(error))

    def __enter__(self) -> Self:
        return self if self.is_started else self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        elif isinstance(error, KeyboardInterrupt):
            self.close("interrupted", exit_code=130, exception="KeyboardInterrupt")
        else:
            self._close_after(error)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Nothing is watched inside: for a profiler or a FLOP counter that must not see Sonde's operations."""
        tracker = self._tracker
        if tracker is None or tracker.is_paused:  # a pause inside of a pause ends with the outer one
            yield
            return
        tracker.pause()
        torch_patches.unsubscribe(tracker)
        try:
            yield
        finally:
            if self._tracker is tracker:  # not closed meanwhile
                torch_patches.subscribe(tracker)
                tracker.resume()

    def log(self, values: Any = None, /, **named: Any) -> None:
        """Record numbers and texts of this step: `session.log(accuracy=0.9)` or `session.log({"accuracy": 0.9})`. A dictionary as a value
        gives several names: `session.log(val={"loss": 0.4})` is `val/loss`. Anything that is not one number or text is left out, with a
        warning that says what to log instead. Tensors on the CPU are read as they are, without a torch operation."""
        tracker = self._tracker
        if tracker is None or tracker.is_paused:
            return
        boundaries = tracker.boundaries
        step = boundaries.number if boundaries.is_active or boundaries.number == 0 else boundaries.number - 1
        try:
            if values is not None and not isinstance(values, Mapping):
                self._warn_refused("", "a value needs a name, as in session.log(accuracy=0.9)", step)
                values = None
            logged = read_logged(named if values is None else {**values, **named})
            for name, text in logged.texts.items():
                self._recorder.emit(TextLogged(name=name, text=text[:MAX_TEXT]), step)
            for name, value in logged.on_device.items():
                tracker.probe(LossProbe).log_deferred(name, value, step)
            for name, reason in logged.refused.items():
                self._warn_refused(name, reason, step)
            if logged.numbers:
                self._recorder.log(step, logged.numbers)
                self.tools.on_log(logged.numbers)
                self._switches.output.on_log(logged.numbers)
        except Exception as error:
            self._isolation.report("log", "", error)

    def _warn_refused(self, name: str, reason: str, step: int) -> None:
        """A value of the user's is not recorded: said once for each name, here and in the report."""
        if name not in self._refused and len(self._refused) < MAX_REFUSED:
            self._refused.add(name)
            _log.warning("sonde: session.log does not record %r: %s.", name, reason)
            self._recorder.emit(NotMeasured(probe="session.log", where=name, reason=reason), step)

    def log_metrics(self, values: Mapping[str, Any]) -> None:
        """Record numbers and texts that a framework logs; anything else is passed over. A name that every step has goes into `logged/`."""
        if not isinstance(values, Mapping):
            raise SondeError(f"log_metrics takes a mapping from names to numbers, for instance {{'loss': 0.3}}, not {values!r}.")
        self.log({
            f"logged/{name}" if name in STEP_SCALARS else name: value
            for name, value in values.items()
            if isinstance(value, (int, float, str, np.number)) or (isinstance(value, Tensor) and value.numel() == 1)
        })  # fmt: skip

    def emit(self, event: TypedEvent) -> None:
        """Write an event into the run, at the step that is under way."""
        tracker = self._tracker
        if tracker is not None:
            self._recorder.emit(event, tracker.boundaries.number)

    @property
    def last_step(self) -> int | None:
        """The number of the last step; None where nothing is watched."""
        tracker = self._tracker
        return None if tracker is None else max(tracker.boundaries.number - (not tracker.boundaries.is_active), 0)

    @property
    def last_loss(self) -> float | None:
        """The loss of the last backward; of an earlier one where the last is still on a device; None where none is known."""
        tracker = self._tracker
        return None if tracker is None else tracker.state.last_loss

    def report(self) -> Report:
        """What is wrong with this training so far, and why, and what the tools of this session have recorded."""
        if self.run is None:
            raise SondeError("nothing was watched in this process, so there is nothing to report.")
        if self._tracker is not None:
            self._write_records(self._tracker.boundaries.number)
            self._recorder.flush()
        report = sonde.diagnose(self.run, lost=self.describe_lost_records())
        return replace(report, records=self.tools.records()) if self.tools.has_any else report  # they may record more after the end

    def _write_records(self, step: int) -> None:
        """What the tools have recorded becomes part of the run."""
        for tool, text in (dict.fromkeys(self._written_records, "") | dict(self.tools.records())).items():  # "": cleared since
            if self._written_records.get(tool) != text:
                self._written_records[tool] = text
                self._recorder.emit(RecordedWithTool(tool=tool, text=text[:MAX_TEXT]), step)

    def clear(self) -> None:
        """Discard what the tools of this session have recorded so far. The run, hooks and attached models stay."""
        self.tools.clear()

    def enable_debugging(self, switches: str | Iterable[str] | None = None) -> None:
        """Turn switches on, all of them where none is named; from the next step on where one is under way. Their names are in
        `sonde.runlog.switch_file.SWITCHES`."""
        self._switches.request(switches, True, "session")

    def disable_debugging(self, switches: str | Iterable[str] | None = None) -> None:
        """Turn switches off at once, all of them where none is named."""
        self._switches.turn_off(switches, "session")

    def get_debugging_status(self) -> dict[str, dict[str, Any]]:
        """For each switch: is it on, since which step, by whom, what has it cost (Sonde's own time), how many lines did it write."""
        return self._switches.status()

    def metric(self, name: str, function: Callable[..., Any], *, every: int = 1) -> None:
        """Record a number of your own with the steps: what `function()` or `function(session)` returns after every n-th of them; a
        dictionary gives several names. What it does with the model does not count as training. An error in it does not reach the
        training."""
        self._triggers.add_metric(name, function, every)
        self._plan_handlers()

    def when(self, condition: str, then: str | Iterable[str], *, for_steps: int = 20) -> None:
        """Turn switches on when a condition holds at the end of a step, and off again when it has not held for so many steps. "loss_spike",
        "gradient_spike", "nonfinite", "slow_step", or one of your own: "loss > 3 and step > 100"."""
        switches = check_switch_names(then)
        if not switches:
            raise SondeError(f"nothing would happen when {condition}: name the switches to turn on, as in then=['gradient_norms'].")
        self._triggers.add_trigger(condition, switches, for_steps)
        self._plan_handlers()

    def early_stopping(self, monitor: str = "val_loss", *, patience: int = 5, min_delta: float = 0.0, mode: str = "auto") -> EarlyStopping:
        """When to stop: `if stopping.step(val_loss): break`. Each value and the decision, with its reason, are recorded in the run."""
        stopping = EarlyStopping(monitor, patience=patience, min_delta=min_delta, mode=mode, session=self)
        if self._tracker is not None:
            self._switches.output.early_stopping = stopping
        return stopping

    def training_step(self, function: Any = None, /) -> Any:
        """One step of the loop, as a context or as a decorator: a step that fails is recorded, and so are numbers that it returns."""
        from sonde.step_decorator import TrainingStep  # imports this module

        return TrainingStep(self) if function is None else TrainingStep(self)(function)

    def set_hints(
        self, *, has_single_closures: bool = False, library_calls_backward: bool = False, loss_divisor: Callable[[], float] | None = None
    ) -> None:
        """What a framework knows of the training and a session cannot see: optimizers run their closure exactly once; the framework calls
        backward on a loss that a function of the user's has returned; each loss is divided before backward."""
        if self._tracker is not None:
            hints = self._tracker.state.hints
            hints.has_single_closures |= has_single_closures
            hints.library_calls_backward |= library_calls_backward
            hints.loss_divisor = loss_divisor or hints.loss_divisor

    def find_entry_points(self, model: nn.Module) -> None:
        """Not the model itself is called, but a method of it, which calls its parts: they are searched in the first steps."""
        if self._tracker is not None and not any(is_compiled(part) for part in model.modules()):
            self._discovery.find_entry_points()

    def report_error(self, probe: str, where: str, error: Exception) -> None:
        """An error in code that serves this session: it is counted, and what keeps failing is disabled."""
        self._isolation.report(probe, where, error)

    def is_watching(self, probe: str = "", where: str = "") -> bool:
        """Whether the session is open, and this part of it not disabled."""
        return self._tracker is not None and not self._isolation.is_disabled(probe, where)

    tensor_inspector = SessionTool(SessionTools.tensor_inspector)
    stability_checker = SessionTool(SessionTools.stability_checker)
    profiler = SessionTool(SessionTools.profiler)
    weight_analyzer = SessionTool(SessionTools.weight_analyzer)
    gradient_debugger = SessionTool(SessionTools.gradient_debugger)
    memory_profiler = SessionTool(SessionTools.memory_profiler)
    model_diagnostics = SessionTool(SessionTools.model_diagnostics)
    hooks = SessionTool(SessionTools.hooks)
    visualizer = SessionTool(SessionTools.visualizer)

    def profile_model_performance(
        self, loader: Iterable[Any], num_batches: int = 10, *, loss_fn: Callable[..., Tensor] | None = None,
        optimizer: Optimizer | None = None, output: str | Path | None = None,
    ) -> OperationsReport:  # fmt: skip
        """The first model under torch.profiler, on batches of a loader: operations by time with your lines, memory, FLOPs, and a trace in
        `output` (beside the run, where none is named). The model is left as it was unless an optimizer is given: then it trains."""
        model = next((model for model, _ in self.trained_models()), None)
        if model is None:
            raise SondeError(
                "this session watches no model yet, so there is none to profile.\n"
                "Start it with sonde.watch(model), or use sonde.profile_operations(model, loader)."
            )
        target = output if output is not None or self.run is None else self.run / OPERATIONS
        with self.pause():  # the profiler must not see what Sonde does
            return sonde.profile_operations(model, loader, num_batches, loss_fn=loss_fn, optimizer=optimizer, output=target)

    def trained_models(self) -> Iterator[tuple[nn.Module, Optimizer | None]]:
        """The models under watch, each with the optimizer that trains it, where there is exactly one."""
        tracker = self._tracker
        if tracker is None:
            return
        for watched in self._registry:
            model = watched.model
            if model is not None:
                optimizers = self.optimizers_of(model)
                yield model, optimizers[0] if len(optimizers) == 1 else None

    def optimizers_of(self, model: nn.Module) -> list[Optimizer]:
        """The optimizers that hold parameters of a model."""
        own = {id(p) for p in model.parameters()}
        optimizers = self._tracker.gradients.optimizers() if self._tracker is not None else []
        return [each for each in optimizers if any(id(p) in own for p in optimizer_parameters(each))]

    def _attach_tools(self) -> None:
        """Models that were found after a tool was asked for."""
        try:
            self.tools.attach_new_models()
        except Exception as error:
            self._isolation.report("tools", "", error)

    def _plan_handlers(self) -> None:
        if self._tracker is not None:
            self._tracker.plan_handlers()

    def _make_probes(self, context: ProbeContext) -> list[Probe]:
        return [TriggerProbe(context, self._triggers), SwitchFactsProbe(context, self._switches), SwitchProbe(context, self._switches)]

    def _make_handlers(self) -> list[IncidentHandler]:
        """The incident handlers, loaded at the first incident: a healthy training pays for none of them."""
        from sonde.incidents import HandlerContext
        from sonde.incidents.memory_growth_handler import MemoryGrowthHandler
        from sonde.incidents.nonfinite_handler import NonFiniteHandler
        from sonde.incidents.search_cause_in_child import ReplaySearches
        from sonde.incidents.skipped_update_handler import SkippedUpdateHandler
        from sonde.incidents.spike_handler import SpikeHandler

        tracker = self._tracker
        if tracker is None or self.run is None:
            return []
        searches = ReplaySearches(self._models_by_name, tracker.gradients.optimizers, in_process=self.config.replay == "in_process")
        context = HandlerContext(self.config, tracker, self.run, self._models_by_name, self.trained_models, searches)
        handlers: list[IncidentHandler] = [MemoryGrowthHandler(context)]
        if self.config.measured.explains_incidents:
            handlers += [NonFiniteHandler(context), SpikeHandler(context), SkippedUpdateHandler(context)]
        return handlers

    def _models_by_name(self) -> dict[str, nn.Module]:
        return {watched.name: body for watched in self._registry if (body := watched.body) is not None}

    def _watch_attached(self, tracker: StepTracker) -> None:
        if not self.config.measured.anything:
            return
        for model, name in self._models_to_watch:
            self._registry.watch(model, name, tracker.boundaries.number)
        for ref in self._optimizers:
            optimizer = ref()
            if optimizer is not None:
                tracker.add_optimizer(optimizer)

    def _concerns(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer is part of the watched training."""
        if self._discovers_models:
            return True
        known = self._concerned.get(id(optimizer))
        if known is None or known[0]() is not optimizer:
            is_concerned = any(ref() is optimizer for ref in self._optimizers)
            if not is_concerned:
                watched = {id(p) for model in self._registry for _, p in model.parameters()}
                is_concerned = any(id(p) in watched for p in optimizer_parameters(optimizer))
            known = self._concerned[id(optimizer)] = (weakref.ref(optimizer), is_concerned)
        return known[1]

    def _record_disabled(self, probe: str, where: str, error: str) -> None:
        step = self._tracker.boundaries.number if self._tracker is not None else 0
        self._recorder.emit(ProbeDisabled(probe=probe, where=where, error=error), step)


def watch(
    model: nn.Module, optimizer: Any = None, *, to: str | Path | None = None, name: str | None = None, every: int | None = None,
    layers: str | Sequence[str] | None = None, config: DebugConfig | Mapping[str, Any] | None = None, strict: bool = False,
) -> DebugSession:  # fmt: skip
    """Watch a training from here on. `with sonde.watch(model, optimizer) as session:` around the loop is all that is needed. `to` names the
    run's directory, `every` observes every n-th step whatever it costs, `layers` (names or patterns: "encoder.*") measures only these
    layers, `strict` raises errors of Sonde's own. `config` is a `DebugConfig` or a mapping with its settings."""
    session = DebugSession(load_config(config, every=every, layers=layers), to=to, name=name, strict=strict)
    return session.attach(model, optimizer).start()


def debug_session() -> DebugSession:
    """A session with defaults, not started: it watches whatever trains between `start()` and `stop()`."""
    return DebugSession()


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """Result of `run_script`: the run and how the script ended."""

    run: Path | None
    exit_code: int
    script: Script
    exception: BaseException | None = None
    lost: str = ""  # a sentence about records that could not be written, if the run does not mention them


def run_script(
    target: str, args: Sequence[str], *, module: bool, config: DebugConfig, to: str | None, name: str | None, strict: bool,
    on_end: Callable[[], None] | None = None, on_not_writable: Callable[[RunNotWritable], None] | None = None, import_ns: int = 0,
) -> ScriptRun:  # fmt: skip
    """Run a file or a module to its end under a session. Its errors are printed as Python prints them and determine the exit code.
    `on_end` is called after it, still under the session. With `on_not_writable`, it runs without a session where the run cannot be
    written. `import_ns` is the time that the imports of Sonde took, a part of its start."""
    default_name = target.rpartition(".")[2] if module else Path(os.path.abspath(target)).stem
    session = DebugSession(config, to=to, name=name or default_name, strict=strict)
    session._startup_ns = import_ns
    with Script(target, args, module=module) as script:
        is_watched = True
        try:
            session.start(script=target)
        except RunNotWritable as failure:
            if on_not_writable is None:
                raise
            is_watched = False
            on_not_writable(failure)
        atexit.unregister(session._close_at_exit)  # it is closed below
        with fatal_signals_recorded(session.run) if is_watched and session.run is not None else contextlib.nullcontext():
            result = run_to_end(script)
            if on_end is not None:
                on_end()
    if not is_watched:
        return ScriptRun(None, result.exit_code, script, result.exception)
    error = result.exception
    try:
        text = _exception_text(error) if error is not None else ""
        session.record_exception(error)
        session.close(result.how, exit_code=result.exit_code, exception=text)
    except Exception:
        if strict:
            raise
    return ScriptRun(session.run, result.exit_code, script, error, session.describe_lost_records())


def _exception_text(error: BaseException) -> str:
    """`ValueError: why`, or the class alone where there is nothing more to say."""
    try:
        why = str(error)
    except Exception:  # an error of the user's own class
        why = ""
    return f"{type(error).__name__}: {why}"[:2000] if why else type(error).__name__


def _nonfinite_parameters(named: Mapping[str, torch.Tensor], *, runs_users_dispatch: bool = True) -> list[NonFinite]:
    """The first trainable parameters that hold NaN or Inf."""
    trainable = [(name, p) for name, p in named.items() if p.requires_grad]
    events: list[NonFinite] = []
    while len(events) < MAX_BAD_PARAMETERS:
        _, bad = reductions.check_finite([p for _, p in trainable], runs_users_dispatch=runs_users_dispatch)
        if bad < 0:
            break
        name, parameter = trainable[bad]
        trainable = trainable[bad + 1 :]
        found = {key: float(column[0]) for key, column in measure_columns([parameter]).items()}
        events.append(NonFinite(what="parameter", where=name, num_elements=found["num"], num_nan=found["nan"], num_inf=found["inf"]))
    return events


def _cpu_of_children_s() -> float:
    """Processor time of the child processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def _script_name() -> str:
    return Path(sys.argv[0]).stem if sys.argv and sys.argv[0] not in ("", "-c", "-m") else "python"


def _job() -> str:
    """What the ranks of one job have in common and no other job has: they share a run directory without any communication."""
    parts = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "MASTER_ADDR", "MASTER_PORT")]
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        parts.append(str(os.getppid()))  # on one host, the launcher; run ids are often left at "none"
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=4).hexdigest()


def _rank() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():  # frameworks start processes without torchrun's variables
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        with contextlib.suppress(KeyError, ValueError):
            return int(os.environ[rank]), int(os.environ.get(size, "1"))
    return 0, 1
