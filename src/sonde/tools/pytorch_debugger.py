"""PyTorchDebugger: for loops that are written by hand. Each operation is timed, measured and judged by what is usual in the same loop."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import Any

import torch
from torch import Tensor, nn

from sonde.config import DebugConfig, load_config
from sonde.errors import NonFiniteError, SondeError
from sonde.profiler.utilization import num_preemptions
from sonde.session import DebugSession
from sonde.tools.forward_pass import eval_mode_restored, forward_arguments
from sonde.tools.loop_debugger import measurements
from sonde.tools.loop_debugger.debug_info import DebugInfo
from sonde.tools.loop_debugger.find_nan import MOST, Generators, search
from sonde.tools.loop_debugger.loop_report import DebugReport, panels_of, report_of
from sonde.tools.loop_debugger.operation_history import Book
from sonde.tools.loop_debugger.options import Asked
from sonde.tools.loop_debugger.training_log import TrainingLog

PICTURE = "debug_plots.png"
MOST_WARNINGS = 5  # of one kind on the log: the report counts all of them
_log = logging.getLogger("sonde")


class PyTorchDebugger:
    """Wraps the operations of a training loop, or the whole step, and remembers what each took.

    It changes nothing in what it wraps: results, random numbers, training mode, and the anomaly mode of torch are the user's. Where a
    session watches the same training it hears everything as usual; give it as `session` to have its findings in the report.
    """

    def __init__(self, config: DebugConfig | None = None, *, session: DebugSession | None = None) -> None:
        if config is not None and not isinstance(config, DebugConfig):
            raise SondeError(f"config must be a DebugConfig, not a {type(config).__name__}.")
        self.config = config if config is not None else load_config()
        self.session = session
        self._asked = Asked.of(self.config)
        self._book = Book(self._tell)
        self._meter = measurements.Meter(self.config)
        self._threads = threading.local()  # what lies inside what is a matter of each thread
        self._told: dict[str, int] = {}
        self._training_log: TrainingLog | None = None
        self._num_searches = 0

    @property
    def debug_info(self) -> list[DebugInfo]:
        """What is known of every operation, the oldest first; the last 10,000 are kept."""
        return list(self._book.infos)

    # -- operations --------------------------------------------------------------------------------

    @contextmanager
    def debug_context(self, operation: str, model_name: str = "", epoch: int = 0, batch: int = 0) -> Iterator[DebugInfo]:
        """Times and judges a block of code. What it yields is filled when the block has ended, also by an exception."""
        if not isinstance(operation, str) or not operation:
            raise SondeError(f'an operation needs a name, for instance debug_context("forward"); this is {operation!r}.')
        with self._operation(operation, model_name, epoch, batch) as opened:
            yield opened.info

    def debug_forward_pass(self, model: nn.Module, x: Any, *, epoch: int = 0, batch: int = 0) -> Any:
        """The model's output for `x` (a tensor, a tuple of arguments or a dict of keyword arguments), as `model(x)` gives it."""
        with self._operation("forward_pass", _name(model), epoch, batch) as opened:
            output = _call(model, x)
            opened.ended()
            if self._asked.anything and not measurements.is_finite(output):
                self._book.note(opened.info, "the output is not finite")
                self._stop_if_asked("what the model put out is not finite", None)
            return output

    def debug_backward_pass(self, loss: Tensor, model: nn.Module, *, epoch: int = 0, batch: int = 0) -> dict[str, Any]:
        """`loss.backward()`, and how large the gradients are. With anomaly_detection_mode "raise" a bad number ends it here."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise SondeError(f"backward needs a loss of one number, not {shape}. Reduce it, for instance with loss.mean().")
        with self._operation("backward_pass", _name(model), epoch, batch) as opened:
            self._backward(loss)
            opened.ended()
            return self._after_backward(opened.info, loss, model)

    def debug_optimization_step(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        *,
        closure: Callable[[], Any] | None = None,
        epoch: int = 0,
        batch: int = 0,
    ) -> dict[str, Any]:
        """`optimizer.step()`, how large the parameters are afterwards and, from level ADVANCED on, how much they changed."""
        self._meter.know(model, optimizer)
        with self._operation("optimization_step", _name(model), epoch, batch) as opened:
            self._meter.before_update(model)
            opened.begins()
            optimizer.step(closure) if closure is not None else optimizer.step()
            opened.ended()
            found = self._meter.after_update(model, optimizer)
            opened.info.param_norm = norm = found["param_norm"]
            if norm is not None and not math.isfinite(norm):
                self._book.note(opened.info, "a parameter is not finite after the update")
        return {**found, "execution_time": opened.info.execution_time, "anomaly_detected": opened.info.anomaly_detected}

    def debug_memory_usage(self) -> dict[str, Any]:
        """MiB: of the process, of the GPU, and, where a model was seen, which tensors take it."""
        return self._meter.memory_now()

    def debug_performance(self, op: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Calls `op(*args, **kwargs)` and says how long it took, with its `result`; or, for the name of an operation, what is known of
        its times so far."""
        if isinstance(op, str):
            return self.create_debug_report().operation(op)
        if not callable(op):
            raise SondeError(f"debug_performance takes something to call, or the name of an operation, not a {type(op).__name__}.")
        name = str(getattr(op, "__name__", type(op).__name__))
        with self._operation(name, "", 0, 0) as opened:
            result = op(*args, **kwargs)
        return {**self.create_debug_report().operation(name), "execution_time": opened.info.execution_time, "result": result}

    # -- whole steps -------------------------------------------------------------------------------

    def debug_training_step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[Any, Any], Tensor],
        x: Any,
        y: Any,
        epoch: int = 0,
        batch: int = 0,
    ) -> dict[str, Any]:
        """zero_grad, forward, loss, backward, step: one update, with what it measured. A bad loss or gradient is traced to its operation;
        with anomaly_detection_mode "raise" the parameters are then left as they were."""
        self._meter.know(model, optimizer)
        with self._operation("training_step", _name(model), epoch, batch) as whole:
            whole.has_judged = True
            generators = Generators() if self._asked.looks_back else None
            whole.begins()
            optimizer.zero_grad()
            with self._operation("forward_pass", _name(model), epoch, batch) as opened:
                output = _call(model, x)
                opened.ended()
            with self._operation("loss", _name(model), epoch, batch):
                loss = loss_fn(output, y)
            del output
            again = None
            if generators is not None:
                again = partial(search, model, _modules(loss_fn), generators, lambda: loss_fn(_call(model, x), y))
            with self._operation("backward_pass", _name(model), epoch, batch) as opened:
                self._backward(loss)
                opened.ended()
                found = self._after_backward(opened.info, loss, model, again)
            del loss, again  # its graph would live through the update
            updated = self.debug_optimization_step(optimizer, model, epoch=epoch, batch=batch)
            whole.info.loss, whole.info.gradient_norm, whole.info.param_norm = found["loss"], found["gradient_norm"], updated["param_norm"]
        info = whole.info
        values = {
            "loss": info.loss, "gradient_norm": info.gradient_norm, "param_norm": info.param_norm, "cpu_memory": info.memory_usage,
            "gpu_memory": info.gpu_memory, "execution_time": info.execution_time,
        }  # fmt: skip
        if self._training_log is not None:
            self._training_log.step({"step": info.number, "epoch": epoch, "batch": batch, **values})
        return values

    def debug_model_inference(self, model: nn.Module, x: Any) -> dict[str, Any]:
        """The output in eval mode without gradients, and what it took. The model's training mode is then as before."""
        with self._operation("inference", _name(model), 0, 0) as opened, eval_mode_restored(model):
            opened.begins()
            output = _call(model, x)
            opened.ended()
            finite = measurements.is_finite(output)
            if not finite:
                self._book.note(opened.info, "the output is not finite")
        info, size = opened.info, measurements.batch_size(x)
        took = info.execution_time
        return {
            "output": output, "execution_time": took, "samples_per_second": size / took if size and took else None, "is_finite": finite,
            "cpu_memory": info.memory_usage, "gpu_memory": info.gpu_memory,
        }  # fmt: skip

    # -- what was found ----------------------------------------------------------------------------

    def setup_training_logging(self, name: str) -> logging.Logger:
        """A log of the training steps to come: a file in `output_dir` and lines on the terminal, at most one a second, and what is out of
        the ordinary. Called again, the log before is closed."""
        self.close()
        self._training_log = TrainingLog(name, Path(self.config.output_dir))
        return self._training_log.logger

    def close(self) -> None:
        """Close the log, if there is one. What was recorded stays."""
        log, self._training_log = self._training_log, None
        if log is not None:
            log.close()

    def create_debug_report(self) -> DebugReport:
        """What was recorded so far, in five sections; it is a dict, and prints as text."""
        return report_of(self._book, self._meter, self.session)

    create_comprehensive_report = create_debug_report

    def create_debug_plots(self, path: str | Path | None = None) -> Path:
        """Losses, gradient norms, times and memory in one picture; in `output_dir` where no path is given."""
        target = Path(path) if path is not None else Path(self.config.output_dir) / PICTURE
        return panels_of(self._book).save(target)

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _open(self) -> list[_Open]:
        if not hasattr(self._threads, "open"):
            self._threads.open = []
        found: list[_Open] = self._threads.open
        return found

    @contextmanager
    def _operation(self, name: str, model_name: str, epoch: int, batch: int) -> Iterator[_Open]:
        around = self._open[-1].info.operation if self._open else ""
        info = DebugInfo(
            time.time(), self.config.mode, self.config.level, name, model_name, epoch, batch, inside=around,
            number=self._book.number_of(name, around),
        )  # fmt: skip
        opened = _Open(info)
        if not self._asked.anything:
            yield opened
            return
        self._open.append(opened)
        with ExitStack() as torch_mode:
            if self._asked.torch_anomaly and len(self._open) == 1:
                torch_mode.enter_context(measurements.anomaly_mode(check_nan=self.config.anomaly_detection_mode == "raise"))
            opened.begins()
            try:
                yield opened
            except BaseException as error:
                info.error = f"{type(error).__name__}: {error}"[:500]
                raise
            finally:
                opened.ended()
                self._close(opened)

    def _close(self, opened: _Open) -> None:
        info = opened.info
        info.execution_time = opened.seconds()
        info.memory_usage, info.gpu_memory = measurements.process_memory_mb(), measurements.gpu_memory_mb()
        self._book.add(info, worked_s=opened.worked_s(), numbers_judged=opened.has_judged)
        self._open.remove(opened)
        for around in self._open[-1:]:
            around.info.anomaly_detected |= info.anomaly_detected
            around.info.notes.extend(note for note in info.notes if note not in around.info.notes)
            around.left_out_ns += opened.own_ns()

    def _backward(self, loss: Tensor) -> None:
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            ours = self._asked.torch_anomaly and self.config.anomaly_detection_mode == "raise"
            if not ours or "returned nan values" not in str(error):
                raise  # the user's own anomaly mode, or something else: theirs to catch
            raise NonFiniteError(f"{error} Training was stopped before the update.") from error

    def _after_backward(
        self, info: DebugInfo, loss: Tensor, model: nn.Module, again: Callable[[], Any] | None = None
    ) -> dict[str, Any]:
        found = self._meter.gradients(loss, model, info.number) if self._asked.anything else measurements.NOTHING
        info.loss, info.gradient_norm = found["loss"], found["gradient_norm"]
        bad = next((what for what in ("loss", "gradient_norm") if found[what] is not None and not math.isfinite(found[what])), "")
        if bad:
            what = "the loss" if bad == "loss" else f"the gradient of {found['first_bad']}"
            origin: Any = None
            if again is not None and self._num_searches < MOST:
                self._num_searches += 1
                origin = again()
                known = hasattr(origin, "place")
                info.notes.append(f"{origin.place}: {origin.cause}" if known else f"where it was made is not known: {origin}")
            self._stop_if_asked(f"{what} is not finite", origin)
        return {**found, "anomaly_detected": bool(bad) or info.anomaly_detected}

    def _stop_if_asked(self, what: str, origin: Any) -> None:
        if self.config.anomaly_detection_mode == "raise":
            found = f"\n{origin.summary()}" if hasattr(origin, "summary") else ""
            raise NonFiniteError(f"{what}. Training was stopped before the update.{found}", origin if found else None)

    def _tell(self, kind: str, sentence: str) -> None:
        self._told[kind] = self._told.get(kind, 0) + 1
        if self._told[kind] > MOST_WARNINGS:
            return
        last = " (further ones are only counted)" if self._told[kind] == MOST_WARNINGS else ""
        if self._training_log is not None:
            self._training_log.warning(f"{sentence}{last}")
        else:
            _log.warning("sonde: %s%s", sentence, last)


PyTorchDebugManager = PyTorchDebugger


class _Open:
    """An operation under way, and its clock: from `begins` to `ended`, without what Sonde does in the operations inside."""

    __slots__ = ("_began", "_ended", "_entered", "_pushed_off", "_worked", "has_judged", "info", "left_out_ns")

    def __init__(self, info: DebugInfo) -> None:
        self.info = info
        self.left_out_ns = 0
        self.has_judged = False
        self._entered = perf_counter_ns()
        self._began = self._ended = self._worked = self._pushed_off = 0

    def begins(self) -> None:
        measurements.wait_for_devices()
        self._pushed_off, self._worked = -num_preemptions(), -thread_time_ns()
        self._began = perf_counter_ns()

    def ended(self) -> None:
        """The work is done, once the devices have done it too. The first call counts."""
        if not self._ended:
            measurements.wait_for_devices()
            self._ended = perf_counter_ns()
            self._pushed_off, self._worked = self._pushed_off + num_preemptions(), self._worked + thread_time_ns()

    def seconds(self) -> float:
        return max(0, self._ended - self._began - self.left_out_ns) / 1e9

    def worked_s(self) -> float | None:
        """The time that this thread had a processor, where others took it away in between; None where nobody did."""
        return self._worked / 1e9 if self._pushed_off else None

    def own_ns(self) -> int:
        """Of the time since it was entered, what was not its work."""
        return perf_counter_ns() - self._entered - round(self.seconds() * 1e9)


def _call(model: nn.Module, x: Any) -> Any:
    if isinstance(x, list):
        return model(x)
    ((args, kwargs),) = forward_arguments(x)
    return model(*args, **kwargs)


def _name(model: nn.Module) -> str:
    if not isinstance(model, nn.Module):
        raise SondeError(f"this takes a torch.nn.Module as the model, not a {type(model).__name__}.")
    return type(getattr(model, "_orig_mod", model)).__name__


def _modules(loss_fn: Any) -> list[nn.Module]:
    return [loss_fn] if isinstance(loss_fn, nn.Module) else []
