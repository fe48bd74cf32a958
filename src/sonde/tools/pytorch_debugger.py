"""PyTorchDebugger: wraps the operations of a hand-written training loop, or whole steps, and records and checks each of them in memory,
without a session, a run directory or patches of torch. Files are written into `output_dir`, and only on request."""

from __future__ import annotations

import json
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn

from sonde.config import SWITCH_SETTINGS, DebugConfig, DebugMode, as_config, load_config
from sonde.errors import NonFiniteError, SondeError, require_function
from sonde.formatting import listing, strict
from sonde.layer_name_patterns import require_name
from sonde.nonfinite.origin_types import Origin
from sonde.profiler.run_forward_pass import eval_mode_restored, forward_arguments
from sonde.session import DebugSession
from sonde.statistics.find_tensors import find_tensors
from sonde.tools.hook_that_never_raises import require_module
from sonde.tools.loop_debugger import measure_loop_operation
from sonde.tools.loop_debugger.batch_log_file import RotatingFile, TrainingLogger
from sonde.tools.loop_debugger.find_nan_operation import MAX_SEARCHES, RandomState, anomaly_mode, find_cause
from sonde.tools.loop_debugger.loop_operation_record import DebugInfo, RunningOperation
from sonde.tools.loop_debugger.loop_report import DebugReport, build_debug_report, plot_history
from sonde.tools.loop_debugger.operation_history import OperationHistory

PLOT_FILE = "debug_analysis.png"
LINES_FILE = "debug_info.jsonl"
MAX_WARNINGS = 5  # of one kind in the log: the report counts all of them
Search = Callable[[], Origin | str]  # for the operation that produced a NaN or Inf, or the reason why it is unknown


class PyTorchDebugger:
    """Records and checks the operations of a training loop. Results, random numbers, training mode and torch's anomaly mode are those of
    the loop without it. The report has the verdict and the findings of a `session` that watches the same training."""

    def __init__(self, config: DebugConfig | Mapping[str, Any] | None = None, *, session: DebugSession | None = None) -> None:
        given = as_config(config)
        self.config = given if given is not None else load_config()
        if session is not None and not isinstance(session, DebugSession):
            raise SondeError(f"session must be a DebugSession, as sonde.watch(model) returns one, not a {type(session).__name__}.")
        self.session = session
        self.logger = logging.getLogger("sonde.debugger")
        if given is not None and session is None and (without_effect := _settings_of_sessions(given)):
            self.logger.warning("sonde: PyTorchDebugger does not use %s: sonde.watch(model, config=…) does.", listing(without_effect))
        self.training_logger: TrainingLogger | None = None
        measured = self._measured = self.config.measured
        self._logs_memory = measured.anything and self.config.log_memory
        self._uses_torch_anomaly = self.config.mode is DebugMode.ANOMALY_DETECTION
        self._time_zone = datetime.now().astimezone().tzinfo  # one object for all timestamps
        self._local = threading.local()  # nesting of operations is per thread
        self.clear()
        self._lines: RotatingFile | None = None
        if self.config.save_debug_info and measured.anything:
            self._lines = RotatingFile(Path(self.config.output_dir) / LINES_FILE)
            weakref.finalize(self, self._lines.close)

    def clear(self) -> None:
        """Discard the recorded operations with their histories and what was learned from them. Files and the training log stay."""
        self._history = OperationHistory(self._report_problem, logs_memory=self._logs_memory, logs_times=self._measured.times)
        self._measurements = measure_loop_operation.LoopMeasurements(self.config)
        self._num_warnings: dict[str, int] = {}
        self._num_searches = 0
        self._has_hint = False

    @property
    def debugger(self) -> PyTorchDebugger:
        """This object: manager and debugger are one class."""
        return self

    @property
    def debug_history(self) -> list[DebugInfo]:
        """Every operation, the oldest first; at most the last 10,000, as in the other histories."""
        return list(self._history.infos)

    @property
    def memory_history(self) -> list[float]:
        """Memory of the process, MiB, at the end of every operation that is not inside another one."""
        return list(self._history.memory_mb)

    @property
    def performance_history(self) -> list[float]:
        """Seconds of every operation that is not inside another one."""
        return list(self._history.times_s)

    @property
    def gradient_history(self) -> list[float]:
        """Gradient norm of every backward pass."""
        return [norm for _, norm in self._history.gradient_norms]

    @property
    def anomaly_detection_active(self) -> bool:
        """Whether the cause of a NaN or Inf is searched."""
        return self._measured.explains_incidents

    @property
    def gradient_checking_active(self) -> bool:
        """Whether gradients are measured by layer (from level INTERMEDIATE on)."""
        return self._measured.gradients

    @property
    def memory_profiling_active(self) -> bool:
        """Whether memory is measured by category (from level INTERMEDIATE on)."""
        return self._measured.memory

    @property
    def performance_profiling_active(self) -> bool:
        """Whether mode and settings ask for the performance of operations."""
        profiles = self.config.mode in (DebugMode.FULL_DEBUG, DebugMode.PERFORMANCE_PROFILING)
        return profiles and self.config.enable_performance_profiling

    @contextmanager
    def debug_context(self, operation: str, model_name: str = "", epoch: int = 0, batch: int = 0) -> Iterator[DebugInfo]:
        """Record a block of code as an operation. Yields its DebugInfo, which is also complete after an exception."""
        if not isinstance(operation, str) or not operation:
            raise SondeError(f'an operation needs a name, for instance debug_context("forward"); this is {operation!r}.')
        with self._operation(operation, model_name, epoch, batch) as running:
            try:
                yield running.info
            except BaseException:
                with suppress(SondeError):
                    _convert_numbers(running.info)
                raise
            running.stop_clock()
            _convert_numbers(running.info)

    def debug_forward_pass(self, model: nn.Module, x: Any, epoch: int = 0, batch: int = 0) -> Any:
        """Call the model and check input and output. `x` is a tensor, a tuple of arguments or a dict of keyword arguments. Returns the
        output of the model."""
        name = _model_name(model)
        search = self._search([model], lambda: _call(model, x))
        with self._operation("forward_pass", name, epoch, batch) as running:
            output, is_finite = self._forward(running, model, x)
            if not is_finite:
                self._raise_if_configured("the output is not finite", self._find_cause(running.info, search))
            return output

    def debug_backward_pass(self, loss: Tensor, model: nn.Module, epoch: int = 0, batch: int = 0) -> float:
        """Call `loss.backward()` and check loss and gradients. Returns the gradient norm. With anomaly_detection_mode "raise", a NaN or Inf
        raises `NonFiniteError`."""
        _check_loss(loss)
        with self._operation("backward_pass", _model_name(model), epoch, batch) as running:
            self._backward(loss)
            running.stop_clock()
            self._check_backward(running, loss, model)
        return running.info.gradient_norm

    def debug_optimization_step(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, epoch: int = 0, batch: int = 0, *,
        closure: Callable[[], Any] | None = None,
    ) -> float:  # fmt: skip
        """Call `optimizer.step()` and check the parameters. Returns their norm after the step. Learning rate and, from level ADVANCED on,
        the size of the update are in the DebugInfo."""
        _check_optimizer(optimizer)
        if closure is not None:
            require_function(closure, "closure", "the function that LBFGS calls to compute the loss")
        with self._operation("optimization_step", _model_name(model), epoch, batch) as running:
            if self._measured.anything:
                self._measurements.before_update(model)
                running.start_clock()
            optimizer.step(closure) if closure is not None else optimizer.step()
            running.stop_clock()
            if self._measured.anything:
                if weights := self._measurements.after_update(running.info, model, optimizer):
                    running.statistics = self._history.statistics["weights"] = weights
                if not math.isfinite(running.info.param_norm):
                    self._history.add_anomaly(running.info, "not finite", "a parameter is not finite after the update")
        return running.info.param_norm

    def debug_memory_usage(self, epoch: int = 0, batch: int = 0) -> tuple[float, float]:
        """Memory now, MiB: of the process, and of tensors on GPUs (0.0 without one)."""
        with self._operation("memory_usage", "", epoch, batch):
            pass
        return measure_loop_operation.process_memory_mb(), measure_loop_operation.gpu_memory_mb()

    def debug_performance(self, operation: str | Callable[[], Any], epoch: int = 0, batch: int = 0) -> float:
        """Seconds of the last operation of this name; a callable is called and timed, as an operation with its name."""
        if isinstance(operation, str):
            return self._history.last_times_s[require_name(operation, self._history.last_times_s, "operation")]
        if not callable(operation):
            raise SondeError(f"debug_performance takes the name of an operation or a function to call, not a {type(operation).__name__}.")
        with self._operation(str(getattr(operation, "__name__", type(operation).__name__)), "", epoch, batch) as running:
            operation()
        return running.info.execution_time

    def debug_training_step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Callable[[Any, Any], Tensor], x: Any, y: Any, epoch: int = 0,
        batch: int = 0,
    ) -> dict[str, Any]:  # fmt: skip
        """One update (zero_grad, forward pass, loss, backward pass, optimizer step). The cause of a NaN or Inf is searched;
        with anomaly_detection_mode "raise", `NonFiniteError` is then raised before the optimizer step. Returns loss, gradient_norm,
        param_norm, cpu_memory and gpu_memory (MiB), execution_time (seconds)."""
        _check_optimizer(optimizer)
        name = _model_name(model)
        if not callable(loss_fn):
            raise SondeError(f"loss_fn must be a function of output and target, for instance nn.MSELoss(), not a {type(loss_fn).__name__}.")
        with self._operation("training_step", name, epoch, batch) as step:
            step.is_checked = True
            modules = [model, loss_fn] if isinstance(loss_fn, nn.Module) else [model]
            search = self._search(modules, lambda: loss_fn(_call(model, x), y))
            step.start_clock()
            optimizer.zero_grad()
            with self._operation("forward_pass", name, epoch, batch) as running:
                output, _ = self._forward(running, model, x)
            with self._operation("loss", name, epoch, batch):
                loss = loss_fn(output, y)
            del output
            _check_loss(loss)
            with self._operation("backward_pass", name, epoch, batch) as running:
                self._backward(loss)
                running.stop_clock()
                self._check_backward(running, loss, model, search)
            info = step.info
            info.loss, info.gradient_norm = running.info.loss, running.info.gradient_norm
            del loss, running  # the graph would live through the update
            info.param_norm = self.debug_optimization_step(optimizer, model, epoch, batch)
        values = {
            "loss": info.loss, "gradient_norm": info.gradient_norm, "param_norm": info.param_norm, "cpu_memory": info.memory_usage,
            "gpu_memory": info.gpu_memory, "execution_time": info.execution_time,
        }  # fmt: skip
        if self.training_logger is not None:
            self.training_logger.log_batch_metrics({"step": info.number, "epoch": epoch, "batch": batch, **self._logged(values)})
        return values

    def debug_model_inference(self, model: nn.Module, x: Any) -> dict[str, Any]:
        """Call the model in eval mode without gradients; the training mode of every module is restored. Returns output, is_finite,
        execution_time (seconds), samples_per_second (None where unknown), cpu_memory and gpu_memory (MiB)."""
        with self._operation("inference", _model_name(model), 0, 0) as running, eval_mode_restored(model):
            output, is_finite = self._forward(running, model, x)
        info, size = running.info, measure_loop_operation.batch_size(x)
        time_s = info.execution_time
        return {
            "output": output, "execution_time": time_s, "samples_per_second": size / time_s if size and time_s else None,
            "is_finite": is_finite, "cpu_memory": info.memory_usage, "gpu_memory": info.gpu_memory,
        }  # fmt: skip

    def setup_training_logging(self, name: str, *, interval_s: float = 0.0) -> logging.Logger:
        """Log training steps and warnings to `<output_dir>/<name>.log`, rotated by size, and to the terminal. The file has a line per
        batch, or with `interval_s` at most one in so many seconds; the terminal at most one per second. A second call closes the first
        log."""
        log = TrainingLogger(name, Path(self.config.output_dir), interval_s=interval_s)
        self.close()
        self.training_logger = log
        weakref.finalize(self, log.close)
        return log.logger

    def close(self) -> None:
        """Close the files. The recorded operations stay."""
        log, self.training_logger = self.training_logger, None
        for file in (log, self._lines):  # the latter is opened again by the next operation
            if file is not None:
                file.close()

    def create_debug_report(self) -> DebugReport:
        """The recorded operations in five sections, and what else is known in `details`. A dict that prints as text."""
        return build_debug_report(self._history, self._measurements, self.config, self.session)

    create_comprehensive_report = create_debug_report

    def create_debug_plots(self, path: str | Path | None = None) -> Path:
        """Draw execution times, memory, gradient norms and anomalies into `path`, by default `debug_analysis.png` in `output_dir`. Returns
        the path. With nothing recorded, an existing file is not replaced."""
        if path is not None and not isinstance(path, (str, Path)):
            raise SondeError(f"the plot is written to a file, for instance create_debug_plots('debug.png'), not to {path!r}.")
        target = Path(path) if path is not None else Path(self.config.output_dir) / PLOT_FILE
        return target if not self._history.num and target.exists() else plot_history(self._history).save(target)

    @property
    def _running(self) -> list[RunningOperation]:
        """The operations of this thread, the outermost first."""
        found: list[RunningOperation] = vars(self._local).setdefault("running", [])
        return found

    @contextmanager
    def _operation(self, name: str, model_name: str, epoch: int, batch: int) -> Iterator[RunningOperation]:
        entered_ns = perf_counter_ns()
        enclosing = self._running[-1].info.operation if self._running else ""
        info = DebugInfo(
            datetime.now(self._time_zone), self.config.mode, self.config.level, name, model_name, epoch, batch, inside=enclosing,
            number=self._history.next_number(name, enclosing),
        )  # fmt: skip
        running = RunningOperation(info, entered_ns)
        if not self._measured.anything:
            yield running
            return
        self._running.append(running)
        with ExitStack() as torch_mode:
            if self._uses_torch_anomaly and len(self._running) == 1:
                torch_mode.enter_context(anomaly_mode(check_nan=self.config.anomaly_detection_mode == "raise"))
            running.start_clock()
            info.start(running.seconds)
            try:
                yield running
            except BaseException as error:
                info.error = f"{type(error).__name__}: {error}"[:500]
                # Not if the user interrupts, or if the anomaly behind the error is recorded, here or in an operation inside.
                if isinstance(error, Exception) and not info.anomaly_detected:
                    self._history.add_anomaly(info, "exception", info.error)
                raise
            finally:
                running.stop_clock()
                self._end(running)

    def _end(self, running: RunningOperation) -> None:
        info = running.info
        info.end(running.seconds())
        if not running.is_checked:  # numbers that the block has set
            if info.loss != 0:
                self._history.check_loss(info, info.loss)
            if info.gradient_norm != 0:
                self._history.check_gradient_norm(info, info.gradient_norm)
        self._history.add(info, cpu_s=running.cpu_s())
        if self._lines is not None:
            line = self._logged(info.to_dict()) | ({"statistics": running.statistics} if running.statistics else {})
            self._lines.write_line(json.dumps(strict(line), allow_nan=False))
        self._running.remove(running)
        for enclosing in self._running[-1:]:
            enclosing.info.anomaly_detected |= info.anomaly_detected
            enclosing.info.notes.extend(note for note in info.notes if note not in enclosing.info.notes)
            enclosing.excluded_ns += running.own_ns()

    def _logged(self, values: dict[str, Any]) -> dict[str, Any]:
        """Without the values that `log_memory` and `log_performance` leave out."""
        memory = () if self._logs_memory else ("cpu_memory", "memory_usage", "gpu_memory", "memory_leak_detected")
        times = () if self._measured.times else ("execution_time", "performance_issue_detected")
        return {name: value for name, value in values.items() if name not in (*memory, *times)}

    def _forward(self, running: RunningOperation, model: nn.Module, x: Any) -> tuple[Any, bool]:
        """The output of the model, and whether it is finite."""
        if not self._measured.anything:
            return _call(model, x), True
        if not measure_loop_operation.is_finite(x):
            self._history.add_anomaly(running.info, "not finite", "the input is not finite")
        running.start_clock()
        output = _call(model, x)
        running.stop_clock()
        is_finite = measure_loop_operation.is_finite(output)
        if not is_finite:
            self._history.add_anomaly(running.info, "not finite", "the output is not finite")
        if self._measured.activations:
            named = [(f"output.{place}", tensor) for place, tensor in find_tensors(output)]
            running.statistics = self._history.statistics["outputs"] = measure_loop_operation.statistics_by_name(named)
        return output, is_finite

    def _backward(self, loss: Tensor) -> None:
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            is_own_mode = self._uses_torch_anomaly and self.config.anomaly_detection_mode == "raise"
            if not is_own_mode or "returned nan values" not in str(error):
                raise  # by the user's own anomaly mode, or another error
            raise NonFiniteError(f"{error} Training was stopped before the update.") from error

    def _check_backward(self, running: RunningOperation, loss: Tensor, model: nn.Module, search: Search | None = None) -> None:
        info = running.info
        info.loss = float(loss.detach())
        if not self._measured.anything:
            return
        running.is_checked = True
        norm, first_bad, has_gradients = self._measurements.after_backward(model)
        info.gradient_norm = norm
        self._history.check_loss(info, info.loss)
        measure = partial(measure_loop_operation.param_norm, model)
        self._history.check_gradient_norm(info, norm, measure, first_bad=first_bad, has_gradients=has_gradients)
        if not (math.isfinite(info.loss) and math.isfinite(norm)):
            where = "the loss" if not math.isfinite(info.loss) else f"the gradient of {first_bad or 'the model'}"
            if search is None and self.anomaly_detection_active and not self._num_searches and not self._has_hint:
                self._has_hint = True  # the loss function and its inputs are not known here, so the step cannot run again
                hint = "the cause is searched by debug_training_step, or by sonde.find_origin(model) around forward, loss and backward"
                self._history.add_note(info, "cause", hint)
            self._raise_if_configured(f"{where} is not finite", self._find_cause(info, search))

    def _search(self, modules: list[nn.Module], run: Callable[[], Any]) -> Search | None:
        """The search with the present state of the random generators; None where causes are not searched."""
        return partial(find_cause, modules, RandomState(), run) if self._measured.explains_incidents else None

    def _find_cause(self, info: DebugInfo, search: Search | None) -> Origin | str | None:
        """The operation that produced a NaN or Inf; it is logged and stored at once. None where it is not searched."""
        if search is None or self._num_searches >= MAX_SEARCHES:
            return None
        self._num_searches += 1
        origin = search()
        sentence = f"the cause is unknown: {origin}" if isinstance(origin, str) else f"cause: {origin.place}: {origin.cause}"
        self._history.add_note(info, "cause", sentence)
        return origin

    def _raise_if_configured(self, message: str, origin: Origin | str | None) -> None:
        if self.config.anomaly_detection_mode == "raise":
            found = origin if isinstance(origin, Origin) else None
            summary = f"\n{found.summary()}" if found is not None else ""
            raise NonFiniteError(f"{message}. Training was stopped before the update.{summary}", found)

    def _report_problem(self, kind: str, sentence: str) -> None:
        if kind == "exception":
            return  # the user gets it
        num = self._num_warnings[kind] = self._num_warnings.get(kind, 0) + 1
        if num > MAX_WARNINGS:
            return
        sentence += " (further ones are only counted)" if num == MAX_WARNINGS else ""
        if self.training_logger is not None:
            self.training_logger.warning(sentence)
        else:
            self.logger.warning("sonde: %s", sentence)


PyTorchDebugManager = PyTorchDebugger


def _settings_of_sessions(config: DebugConfig) -> list[str]:
    """The settings that were chosen and act in sessions only."""
    default = DebugConfig()
    names = (*SWITCH_SETTINGS, "layers", "every", "sampling_rate", "memory_threshold_mb", "memory_threshold_share")
    return [name for name in names if getattr(config, name) != getattr(default, name)]


def _call(model: nn.Module, x: Any) -> Any:
    if isinstance(x, list):
        return model(x)
    ((args, kwargs),) = forward_arguments(x)
    return model(*args, **kwargs)


def _model_name(model: nn.Module) -> str:
    return type(require_module(model, "PyTorchDebugger")).__name__


def _check_optimizer(optimizer: Any) -> None:
    if not callable(getattr(optimizer, "step", None)) or not hasattr(optimizer, "param_groups"):
        order = "The order is debug_optimization_step(optimizer, model), debug_training_step(model, optimizer, loss_fn, x, y)."
        raise SondeError(f"optimizer must be a torch.optim.Optimizer, not a {type(optimizer).__name__}. {order}")


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise SondeError(f"the loss must be a tensor of one number, not {shape}. Reduce it, for instance with loss.mean().")


def _convert_numbers(info: DebugInfo) -> None:
    """Convert the numbers that a block has set, tensors for instance, to floats; 0.0 and an error for other values."""
    wrong = ""
    for name in ("loss", "gradient_norm", "param_norm"):
        value: Any = getattr(info, name)
        try:
            setattr(info, name, float(value.detach() if isinstance(value, Tensor) else value))
        except (TypeError, ValueError, RuntimeError):
            setattr(info, name, 0.0)
            wrong = f"{name} of a DebugInfo must be one number, not a {type(value).__name__}."
    if wrong:
        raise SondeError(wrong)
