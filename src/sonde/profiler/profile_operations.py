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
from sonde.errors import SondeError
from sonde.profiler.operation_report import OperationsReport
from sonde.profiler.torch_profiler_events import operation_costs, read_events
from sonde.render.safe_write import file_name
from sonde.statistics.find_tensors import find_tensors

WAIT = 2  # batches before the profiler starts: the first warms up, the second gives the duration of a bare batch
WARMUP = 1  # batches with the profiler on that are discarded: its first use takes longer

Loss = Callable[..., Tensor]


def profile_operations(
    model: nn.Module, loader: Iterable[Any], num_batches: int = 10, *, loss_fn: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None, output: str | Path | None = None,
) -> OperationsReport:  # fmt: skip
    """Run `num_batches` of a loader (and three before them) through a model, forward and backward, and report the time of each operation. A
    batch is a tensor, a tuple or a dict. With `loss_fn`, the last element of a tuple is the target and the loss is `loss_fn(output,
    target)`; for a dict it is `loss_fn(output, batch)`. Without `loss_fn`, the loss is the one that the model returns, or the mean of its
    outputs. With `optimizer`, every batch updates the model. `output` is a directory for a trace, which TensorBoard and Perfetto open."""
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
    title = type(model).__name__
    step = _BatchRunner(model, loss_fn, optimizer)
    bare_ms: list[float] = []
    with ExitStack() as stack:
        if optimizer is None:
            stack.enter_context(state_restored([model, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_quiet_kineto())
        profiler = stack.enter_context(
            torch.profiler.profile(
                schedule=torch.profiler.schedule(wait=WAIT, warmup=WARMUP, active=num_batches, repeat=1),
                record_shapes=True, profile_memory=True, with_stack=True, with_flops=True, acc_events=True,
            )
        )  # fmt: skip
        num_run = 0
        for batch in _batches(loader, WAIT + WARMUP + num_batches):
            start = time.perf_counter()
            step(batch)
            bare_ms += [(time.perf_counter() - start) * 1e3] if 0 < num_run < WAIT else []
            profiler.step()
            num_run += 1
    num_profiled = num_run - WAIT - WARMUP
    if num_profiled < 1:
        raise SondeError(
            f"the loader gave {num_run} batches; {WAIT + WARMUP} are needed to warm up before the first measured one.\n"
            "Pass a loader that can be iterated again (not an iterator), or one with more batches."
        )
    events = read_events(profiler.profiler.kineto_results, {id(module): path for path, module in model.named_modules()})
    notes = list(step.notes)
    if num_profiled < num_batches:
        notes.append(f"the loader ended after {num_profiled} of {num_batches} batches")
    trace = None
    if directory is not None:
        trace = directory / file_name(f"{title.lower()}_{os.getpid()}.{time.time_ns()}", "pt.trace.json.gz")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(trace))
        except (OSError, RuntimeError) as error:
            raise SondeError(f"the trace cannot be written to {directory}: {error}.") from error
    return OperationsReport(
        title=title, num_batches=num_profiled, operations=tuple(operation_costs(events, num_profiled)),
        step_ms=median(events.steps_ns) / 1e6 if events.steps_ns else float("nan"), bare_ms=bare_ms[-1] if bare_ms else float("nan"),
        peak_bytes=events.peak_bytes, trace=trace, notes=tuple(notes),
    )  # fmt: skip


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


def _batches(loader: Iterable[Any], num: int) -> Iterator[Any]:
    """That many batches; a loader that ends earlier is iterated again, unless it is an iterator."""
    while num > 0:
        before = num
        for batch in islice(loader, num):
            yield batch
            num -= 1
        if num == before or iter(loader) is loader:
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
