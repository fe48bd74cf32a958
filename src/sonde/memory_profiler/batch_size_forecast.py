"""Forecasts the peak memory of a training step at another size by running it with fake tensors of that size, which use no memory.

If a model cannot run with fake tensors (it converts to numpy, it depends on values), three small sizes are measured for real and a line (a
parabola for sequences) is fitted.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sonde.capture.training_callbacks import suspended
from sonde.errors import SondeError
from sonde.memory_profiler.allocation_tracker import AllocationTracker
from sonde.memory_profiler.memory_report import MemoryForecast, Usage, check_size
from sonde.profiler.run_forward_pass import forward_arguments
from sonde.statistics.find_tensors import find_tensors
from sonde.statistics.private_torch_api import FakeTensorMode, tree_map_only

NUM_STEPS = 2  # the first creates the optimizer's state, the second has it from its start
MAX_ERROR = 0.1  # share by which a fake step may differ from a real one before real steps are measured instead
REAL_SIZES = (1 / 4, 1 / 2, 1.0)  # of the size of the inputs: measured for real if fake tensors cannot be used


@dataclass(frozen=True, slots=True)
class _ResizableStep:
    """A training step that can be run at any size."""

    model: nn.Module
    inputs: Any
    dimension: int  # of the inputs that is resized: 0 batch, 1 sequence
    size: int  # of that dimension now
    loss: Callable[[Any], Any] | None
    optimizer: Optimizer | None

    def is_resized(self, tensor: Tensor) -> bool:
        return tensor.dim() > self.dimension and tensor.shape[self.dimension] == self.size


def forecast(
    model: nn.Module, inputs: Any, *, batch_size: int | None, sequence_length: int | None, loss: Callable[[Any], Any] | None,
    optimizer: Optimizer | None, measured: tuple[int, int] | None = None, check: bool = True,
) -> MemoryForecast:  # fmt: skip
    """See MemoryProfiler.forecast. `measured` are bytes and batch size of a real peak: without a loss, the forecast is scaled to it."""
    if (batch_size is None) == (sequence_length is None):
        raise SondeError("pass either batch_size=… or sequence_length=….")
    target: Any = batch_size if batch_size is not None else sequence_length
    what, dimension = ("batch size", 0) if batch_size is not None else ("sequence length", 1)
    check_size(what, target)
    size = next((int(tensor.shape[dimension]) for _, tensor in find_tensors(inputs) if tensor.dim() > dimension), 0)
    if not size:
        raise SondeError(f"none of the inputs has a dimension for the {what}: {_shapes(inputs)}.")
    step = _ResizableStep(model, inputs, dimension, size, loss, optimizer)
    with suspended():
        try:
            usage, target_usage = fake_peak(step, size), fake_peak(step, target)
            error_share = _fake_error(step) if check else None
        except Exception as error:  # the model does something that fake tensors do not support
            return _fitted(step, target, what, f"{type(error).__name__}: {error}".splitlines()[0][:160])
        if error_share is not None and error_share > MAX_ERROR:
            return _fitted(step, target, what, f"for a small step they are wrong by {error_share:.0%}")
    how = f"from a step with fake tensors at that {what}"
    fixed = sum(target_usage.by_category()[name] for name in ("parameters", "gradients", "optimizer state")) if measured is not None else 0
    if measured is None or what != "batch size" or measured[1] != size or usage.total <= fixed:
        return MemoryForecast(target_usage.total, what, target, size, usage.total, how, error_share, target_usage)
    # The loss is not known here, but the measured peak includes it: the bytes that grow with the batch are scaled to it.
    scale = max(0.0, measured[0] - fixed) / (usage.total - fixed)
    peak = round(fixed + scale * (target_usage.total - fixed))
    return MemoryForecast(peak, what, target, size, measured[0], f"{how}, scaled to the measured peak", error_share, target_usage)


def _fake_error(step: _ResizableStep) -> float:
    """The error of fake tensors at the smallest size, as a share of the real peak."""
    small = max(1, round(step.size * REAL_SIZES[0]))
    real = _real_peak(step, small)
    return abs(fake_peak(step, small).total - real) / max(1, real)


def fake_peak(step: _ResizableStep, size: int) -> Usage:
    """The live bytes at the peak of a step of that size, run with fake tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    states = list(step.optimizer.state.values()) if step.optimizer is not None else []
    tensors = [value for state in states if isinstance(state, dict) for value in state.values() if isinstance(value, Tensor)]
    # The memo of deepcopy: fake tensors instead of copies of the real ones.
    copies: dict[int, Any] = {id(tensor): mode.from_tensor(tensor) for tensor in (*_model_tensors(step.model), *tensors)}

    def resize(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        if step.is_resized(tensor):
            shape[step.dimension] = size
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad)

    with mode:
        model, optimizer = copy.deepcopy((step.model, step.optimizer), copies)
        inputs = tree_map_only(Tensor, resize, step.inputs)
        return _run(model, inputs, step.loss, optimizer)


def _real_peak(step: _ResizableStep, size: int) -> int:
    model, optimizer = copy.deepcopy((step.model, step.optimizer))

    def resize(tensor: Tensor) -> Tensor:
        return tensor.detach().narrow(step.dimension, 0, size) if step.is_resized(tensor) else tensor

    with torch.random.fork_rng(devices=[]):
        return _run(model, tree_map_only(Tensor, resize, step.inputs), step.loss, optimizer, fake=False).total


def _run(
    model: nn.Module, inputs: Any, loss: Callable[[Any], Any] | None, optimizer: Optimizer | None, *, fake: bool = True
) -> Usage:
    """The live bytes at the peak of some steps."""
    tracker = AllocationTracker({"": model}, [optimizer] if optimizer is not None else [], fake=True)  # existing tensors do not count
    tracker.is_fake = fake
    trains = any(parameter.requires_grad for parameter in model.parameters())
    ((args, kwargs),) = forward_arguments(tuple(inputs) if isinstance(inputs, list) else inputs)
    with tracker, torch.set_grad_enabled(trains):
        for _ in range(NUM_STEPS):
            model.zero_grad(set_to_none=True)
            output = model(*args, **kwargs)
            value = loss(output) if loss is not None else _default_loss(output)
            if isinstance(value, Tensor) and value.requires_grad:
                torch.autograd.backward(value)  # the output stays alive during the backward, as in most loops
            if optimizer is not None:
                # All subscribers are suspended in a forecast, so nobody else calls the tracker.
                tracker.on_optimizer_step_start(optimizer, False)
                optimizer.step()
                tracker.on_optimizer_step_end(optimizer)
    return peak_usage(tracker)


def _default_loss(output: Any) -> Any:
    loss = getattr(output, "loss", None)  # models of transformers return it if they get labels
    if isinstance(loss, Tensor):
        return loss
    sums = [tensor.sum() for _, tensor in find_tensors(output) if tensor.requires_grad]
    return sum(sums[1:], start=sums[0]) if sums else None


def peak_usage(tracker: AllocationTracker) -> Usage:
    """The live bytes at the peak of the device with the highest one."""
    peaks = [device.peak().usage for device in tracker.registry.devices.values()]
    return max(peaks, key=lambda usage: usage.total, default=Usage())


def _model_tensors(model: nn.Module) -> list[Tensor]:
    """Parameters, buffers, and tensors that modules hold as plain attributes."""
    return [
        tensor
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
        if isinstance(tensor, Tensor)
    ]


def _fitted(step: _ResizableStep, target: int, what: str, why: str) -> MemoryForecast:
    """A forecast from real steps. `why` fake tensors could not be used."""
    sizes = sorted({max(1, round(step.size * share)) for share in REAL_SIZES})
    try:
        peaks = [_real_peak(step, size) for size in sizes]
    except Exception as error:
        raise SondeError(
            f"the model could be run neither with fake tensors ({why})\n"
            f"nor for real at {what} {sizes[0]} ({type(error).__name__}: {error}).\n"
            "Are these its inputs, and does loss take its output?"
        ) from error
    peak, error_share = fit(sizes, peaks, target, degree=1 if what == "batch size" else 2)
    how = f"from real steps at {what} {', '.join(map(str, sizes))}: fake tensors could not be used ({why})"
    return MemoryForecast(peak, what, target, sizes[-1], peaks[-1], how, error_share)


def fit(sizes: Sequence[int], peaks: Sequence[float], target: int, *, degree: int) -> tuple[int, float | None]:
    """The value at `target` of the polynomial through the last points, and its relative error at the last point if that is left out. The
    last points are used because at small sizes the peak may be a moment that hardly grows with the size (an optimizer step)."""
    num = min(degree + 1, len(sizes))
    value = np.polyval(np.polyfit(sizes[-num:], peaks[-num:], num - 1), target)
    error = None
    if len(sizes) > 2:
        before = min(num, len(sizes) - 1)
        guess = np.polyval(np.polyfit(sizes[-1 - before : -1], peaks[-1 - before : -1], before - 1), sizes[-1])
        error = abs(float(guess) - peaks[-1]) / max(1.0, float(peaks[-1]))
    return max(0, round(float(value))), error


def _shapes(inputs: Any) -> str:
    return ", ".join(str(list(tensor.shape)) for _, tensor in find_tensors(inputs)) or "no tensors"
