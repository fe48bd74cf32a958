"""Runs batches of the user's data through a model under torch.profiler and reports operations, lines, memory, FLOPs, and a trace.

Without an optimizer, parameters, buffers, gradients and random generators are restored bit by bit. With one, every batch is a real training
step.
"""

import inspect
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from sonde.capture.save_and_restore_model import state_restored
from sonde.capture.torch_trace_file import write_trace
from sonde.errors import SondeError
from sonde.profiler.operation_report import OperationsReport
from sonde.profiler.torch_profiler_events import ProfilerEvents, operation_costs
from sonde.render.safe_write import file_name
from sonde.statistics.find_tensors import find_tensors

WAIT = 2  # batches before the profiler starts: the first warms up, the second gives the duration of a bare batch
WARMUP = 1  # batches with the profiler on that are discarded, whenever it starts: its first use takes longer
MAX_BATCHES = 10  # recorded at once: torch.profiler stores every event until it stops
MAX_EVENTS = 50_000  # recorded at once, about 100 MB; known from the first part on

Loss = Callable[..., Tensor]


def profile_operations(
    model: nn.Module, loader: Iterable[Any], num_batches: int = 10, *, loss_fn: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None, output: str | Path | None = None,
) -> OperationsReport:  # fmt: skip
    """Run `num_batches` of a loader through a model, forward and backward, and report the time of each operation. Some more batches warm
    up: three at first, later one for every ten. The memory that this takes does not grow with `num_batches`.

    A batch is a tensor, a tuple or a dict. With `loss_fn`, the last element of a tuple is the target and the loss is `loss_fn(output,
    target)`; for a dict it is `loss_fn(output, batch)`. Without `loss_fn`, the loss is the one that the model returns, or the mean of its
    outputs. With `optimizer`, every batch updates the model. `output` is a directory for a trace of the first ten batches, which
    TensorBoard and Perfetto open."""
    if not isinstance(model, nn.Module):
        raise SondeError(f"profile_operations needs a torch.nn.Module, not {type(model).__name__}. Pass the model itself.")
    if not isinstance(num_batches, int) or isinstance(num_batches, bool) or num_batches < 1:
        raise SondeError(f"num_batches must be a whole number from 1 on, not {num_batches!r}.")
    if loss_fn is not None and not callable(loss_fn):
        raise SondeError(f"loss_fn must be a function of output and target, for instance nn.CrossEntropyLoss(), not {loss_fn!r}.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise SondeError(f"optimizer must be a torch.optim.Optimizer, not {optimizer!r}. Without it the model is left as it was.")
    directory = Path(output) if output is not None else None
    if directory is not None and directory.exists() and not directory.is_dir():
        raise SondeError(f"{directory} is a file. Pass a directory: the trace becomes a file in it.")
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):  # what iter() takes
        kind = "None" if loader is None else f"a {type(loader).__name__}"
        raise SondeError(f"loader must be a DataLoader or another iterable of batches, not {kind}. For one batch pass a list: [batch].")
    title = type(model).__name__
    with ExitStack() as stack:
        if optimizer is None:
            stack.enter_context(state_restored([model, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_quiet_kineto())
        recorder = _Recorder(model, loader, _BatchRunner(model, loss_fn, optimizer), directory)
        recorder.run(num_batches)
    num, events = recorder.num_profiled, recorder.events
    if num < 1:
        raise SondeError(
            f"the loader gave {recorder.num_run} batches; {WAIT + WARMUP} are needed to warm up before the first measured one.\n"
            "Pass a loader that can be iterated again (not an iterator), or one with more batches."
        )
    notes = list(recorder.runner.notes)
    if num < num_batches:
        notes.append(f"the loader ended after {num:,} of {num_batches:,} batches")
    if recorder.trace is not None and recorder.num_in_trace < num:
        notes.append(f"the trace has the first {recorder.num_in_trace} of {num:,} batches: a longer one is slow to open and large")
    return OperationsReport(
        title=title, num_batches=num, operations=tuple(operation_costs(events, num)),
        step_ms=median(events.steps_ns) / 1e6 if events.steps_ns else float("nan"), bare_ms=recorder.bare_ms,
        peak_bytes=events.peak_bytes, trace=recorder.trace, notes=tuple(notes),
    )  # fmt: skip


class _Recorder:
    """Records batches part by part, so that torch.profiler never holds the events of many."""

    def __init__(self, model: nn.Module, loader: Iterable[Any], runner: "_BatchRunner", directory: Path | None) -> None:
        self.runner, self.events = runner, ProfilerEvents()
        self.trace: Path | None = None
        self.num_run = self.num_profiled = self.num_in_trace = 0
        self.bare_ms = float("nan")
        self._batches = _endless(loader)
        self._directory, self._title = directory, type(model).__name__
        self._layers = {id(module): path for path, module in model.named_modules()}

    def run(self, num_batches: int) -> None:
        size, wait = MAX_BATCHES, WAIT
        while self.num_profiled < num_batches:
            num = min(size, num_batches - self.num_profiled)
            profiler = torch.profiler.profile(
                schedule=torch.profiler.schedule(wait=wait, warmup=WARMUP, active=num, repeat=1),
                record_shapes=True, profile_memory=True, with_stack=True, with_flops=True,
            )  # fmt: skip
            num_before = self.num_run
            with profiler:
                for batch in islice(self._batches, wait + WARMUP + num):
                    start = time.perf_counter()
                    self.runner(batch)
                    self.num_run += 1
                    if self.num_run == WAIT:
                        self.bare_ms = (time.perf_counter() - start) * 1e3
                    profiler.step()
            num_recorded = self.num_run - num_before - wait - WARMUP
            if num_recorded < 1:
                return
            self.num_profiled += num_recorded
            assert profiler.profiler is not None  # it has run
            num_events = self.events.add(profiler.profiler.kineto_results, self._layers)
            if self._directory is not None and self.trace is None:
                self._write_trace(profiler, self._directory)
                self.num_in_trace = num_recorded
            profiler.profiler = None  # the events: the object itself is in a reference cycle and lives until a garbage collection
            if num_recorded < num:
                return
            size, wait = max(1, min(MAX_BATCHES, MAX_EVENTS * num // max(num_events, 1))), 0

    def _write_trace(self, profiler: torch.profiler.profile, directory: Path) -> None:
        target = directory / file_name(f"{self._title.lower()}_{os.getpid()}.{time.time_ns()}", "pt.trace.json.gz")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_trace(profiler, target)
        except (OSError, RuntimeError) as error:
            raise SondeError(f"the trace cannot be written to {directory}: {error}.") from error
        self.trace = target


class _BatchRunner:
    """Runs one batch: forward, loss and backward, and with an optimizer an update."""

    def __init__(self, model: nn.Module, loss_fn: Loss | None, optimizer: torch.optim.Optimizer | None) -> None:
        self._model, self._loss_fn, self._optimizer = model, loss_fn, optimizer
        self._parameters = [p for p in model.parameters() if not nn.parameter.is_lazy(p)]
        self._device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self.notes: dict[str, None] = {f"the model was in {'train' if model.training else 'eval'} mode": None}  # a set in order

    def __call__(self, batch: Any) -> None:
        batch = _to_device(batch, self._device)
        for p in self._parameters:
            p.grad = None
        # torch_profiler_events.py recognizes the phase by the names of the functions; the trace shows the names of the records.
        with record_function("forward"):
            output = run_forward(self._model, batch, with_target=self._loss_fn is not None)
        with record_function("loss"):
            loss = self.run_loss(output, batch)
        if not loss.requires_grad:
            self.notes["nothing requires a gradient, so there was no backward"] = None
            return
        with record_function("backward"):
            self.run_backward(loss)
        if self._optimizer is not None:
            self.run_update(self._optimizer)

    @staticmethod
    def run_backward(loss: Tensor) -> None:
        torch.autograd.backward(loss)

    @staticmethod
    def run_update(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def run_loss(self, output: Any, batch: Any) -> Tensor:
        if self._loss_fn is not None:
            target = batch if isinstance(batch, (Mapping, Tensor)) else batch[-1]
            return self._loss_fn(output, target)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(loss, Tensor):
            return loss
        if isinstance(output, Tensor) and output.numel() == 1:
            return output.reshape(())
        floating = [tensor for _, tensor in find_tensors(output) if tensor.is_floating_point()]
        if not floating:
            raise SondeError(
                f"the model returned {type(output).__name__} without a floating-point tensor, so there is no loss.\n"
                "Pass loss_fn=…, a function of the output and the target."
            )
        self.notes["no loss_fn was given: the backward started at the mean of the outputs"] = None
        return torch.stack([tensor.float().mean() for tensor in floating]).sum()


def run_forward(model: nn.Module, batch: Any, *, with_target: bool) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if not isinstance(batch, (tuple, list)):
        return model(batch)
    if with_target and len(batch) > 1:
        return model(*batch[:-1])
    # Without a loss function it is not known which elements are inputs: as many as forward requires.
    parameters = inspect.signature(model.forward).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return model(*batch[: max(len(needed), 1)])


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _to_device(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_to_device(item, device) for item in value]
    return value


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of a loader; it is iterated again when it ends, unless it is an iterator or empty."""
    is_empty = False
    while not is_empty:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if iter(loader) is loader:
            return


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Kineto logs to stderr when it starts and stops, unless the log level is set before its first use."""
    name = "KINETO_LOG_LEVEL"
    is_set = name in os.environ
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if not is_set:
            os.environ.pop(name, None)
