"""The peak of a training step at another size: the step is lived through with fake tensors of that size, which take no memory.

Where a model cannot be run with fake tensors (it converts to numpy, it asks for its numbers), three small sizes are measured for real and
a line (a parabola for sequences) is laid through them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from sonde.capture.patches import suspended
from sonde.errors import SondeError
from sonde.memory_profiler.allocation_tracker import Tracker
from sonde.memory_profiler.memory_report import Forecast, Usage
from sonde.statistics.tensor_utils import find_tensors

NUM_STEPS = 2  # the first makes the optimizer's state, the second has it from the beginning
TOLERATED = 0.1  # share by which a fake step may miss a real one before it is not believed
SMALL = (1 / 4, 1 / 2, 1.0)  # of the size that was given: measured for real where fake tensors cannot be used


class Measured(NamedTuple):
    """A peak that was measured in a real training, with the loss that is really used."""

    num_bytes: int
    batch_size: int


@dataclass(frozen=True, slots=True)
class _Case:
    """A step that can be run at any size."""

    model: nn.Module
    inputs: Any
    dimension: int  # of the inputs that is changed: 0 batch, 1 sequence
    size: int  # that it has now
    loss: Callable[[Any], Any] | None
    optimizer: Optimizer | None

    def sized(self, size: int) -> Any:
        """The inputs at another size. Only their shapes count."""

        def resized(tensor: Tensor) -> Tensor:
            if tensor.dim() <= self.dimension or tensor.shape[self.dimension] != self.size:
                return tensor
            shape = list(tensor.shape)
            shape[self.dimension] = size
            if size <= self.size:
                return tensor.detach().narrow(self.dimension, 0, size)
            return tensor.new_empty(shape) if tensor.is_floating_point() else tensor.new_zeros(shape)

        return tree_map_only(Tensor, resized, self.inputs)


def forecast(
    model: nn.Module,
    inputs: Any,
    *,
    batch_size: int | None,
    sequence_length: int | None,
    loss: Callable[[Any], Any] | None,
    optimizer: Optimizer | None,
    measured: Measured | None = None,
    check: bool = True,
) -> Forecast:
    """See MemoryProfiler.forecast. `measured`: a real peak without a known loss, by which the forecast is scaled."""
    if (batch_size is None) == (sequence_length is None):
        raise SondeError("give batch_size=… or sequence_length=…, one of them.")
    wanted = batch_size if batch_size is not None else sequence_length
    what, dimension = ("batch size", 0) if batch_size is not None else ("sequence length", 1)
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise SondeError(f"a {what} is a whole number from 1 on, not {wanted!r}.")
    size = next((int(tensor.shape[dimension]) for _, tensor in find_tensors(inputs) if tensor.dim() > dimension), 0)
    if not size:
        raise SondeError(f"none of the inputs has a dimension for the {what}: {_shapes(inputs)}.")
    case = _Case(model, inputs, dimension, size, loss, optimizer)
    with suspended():
        try:
            here, there = fake_step(case, size), fake_step(case, wanted)
            error_share = _missed_by(case) if check else None
        except Exception as error:  # whatever the model does that fake tensors cannot
            return _fitted(case, wanted, what, f"{type(error).__name__}: {error}".splitlines()[0][:160])
        if error_share is not None and error_share > TOLERATED:
            return _fitted(case, wanted, what, f"a small step really takes {error_share:.0%} more or less than its fake")
    how = f"from a step with fake tensors at that {what}"
    fixed = sum(there.by_category()[name] for name in ("parameters", "gradients", "optimizer state")) if measured is not None else 0
    if measured is None or what != "batch size" or measured.batch_size != size or here.total <= fixed:
        return Forecast(there.total, what, wanted, size, here.total, how, error_share, there)
    # The loss is not known here, but what it takes was measured: what grows with the batch is scaled by it.
    scale = max(0.0, measured.num_bytes - fixed) / (here.total - fixed)
    peak = round(fixed + scale * (there.total - fixed))
    return Forecast(peak, what, wanted, size, measured.num_bytes, f"{how}, scaled to the measured peak", error_share, there)


def _missed_by(case: _Case) -> float:
    """How far fake tensors are from a real step at the smallest size."""
    small = max(1, round(case.size * SMALL[0]))
    real = _real_step(case, small)
    return abs(fake_step(case, small).total - real) / max(1, real)


def fake_step(case: _Case, size: int) -> Usage:
    """What is alive at the peak of a step at that size, of which nothing is computed and nothing is kept."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    stands_for: dict[int, Any] = {}  # what deepcopy finds already copied
    for tensor in _tensors_of_model(case.model):
        stands_for[id(tensor)] = mode.from_tensor(tensor)
    if case.optimizer is not None:
        for state in case.optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, Tensor):
                    stands_for[id(value)] = mode.from_tensor(value)
    with mode:
        model = copy.deepcopy(case.model, stands_for)
        optimizer = copy.deepcopy(case.optimizer, stands_for) if case.optimizer is not None else None
        inputs = _empty(case, size)
    tracker = Tracker({"": model}, [optimizer] if optimizer is not None else [], fake=True)
    with mode, tracker:
        _run(model, inputs, case.loss, optimizer)
    return _peak_of(tracker)


def _empty(case: _Case, size: int) -> Any:
    """Inputs of that size without their memory, made under the fake mode that is active."""

    def resized(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        if tensor.dim() > case.dimension and shape[case.dimension] == case.size:
            shape[case.dimension] = size
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad)

    return tree_map_only(Tensor, resized, case.inputs)


def _real_step(case: _Case, size: int) -> int:
    model, optimizer = copy.deepcopy((case.model, case.optimizer))
    tracker = Tracker({"": model}, [optimizer] if optimizer is not None else [], fake=True)  # no census: only what the step takes
    tracker.is_fake = False
    with torch.random.fork_rng(devices=[]), tracker:
        _run(model, case.sized(size), case.loss, optimizer)
    return _peak_of(tracker).total


def _run(model: nn.Module, inputs: Any, loss: Callable[[Any], Any] | None, optimizer: Optimizer | None) -> None:
    trains = any(parameter.requires_grad for parameter in model.parameters())
    with torch.set_grad_enabled(trains):
        for _ in range(NUM_STEPS):
            model.zero_grad(set_to_none=True)
            if isinstance(inputs, Mapping):
                output = model(**inputs)
            elif isinstance(inputs, (tuple, list)):
                output = model(*inputs)
            else:
                output = model(inputs)
            value = loss(output) if loss is not None else _sum(output)
            if isinstance(value, Tensor) and value.requires_grad:
                torch.autograd.backward(value)  # the output stays in its variable meanwhile, as in most loops
            if optimizer is not None:
                optimizer.step()


def _sum(output: Any) -> Any:
    known = getattr(output, "loss", None)  # as models of transformers give it where they were given labels
    if isinstance(known, Tensor):
        return known
    found = [tensor.sum() for _, tensor in find_tensors(output) if tensor.requires_grad]
    return sum(found[1:], start=found[0]) if found else None


def _peak_of(tracker: Tracker) -> Usage:
    peaks = [account.peak().usage for account in tracker.book.accounts.values()]
    return max(peaks, key=lambda usage: usage.total, default=Usage())


def _tensors_of_model(model: nn.Module) -> list[Tensor]:
    """Parameters, buffers, and tensors that modules hold as plain attributes."""
    return [
        tensor
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
        if isinstance(tensor, Tensor)
    ]


def _fitted(case: _Case, wanted: int, what: str, why: str) -> Forecast:
    sizes = sorted({max(1, round(case.size * share)) for share in SMALL})
    try:
        peaks = [_real_step(case, size) for size in sizes]
    except Exception as error:
        raise SondeError(
            f"the model could be run neither with fake tensors ({why})\n"
            f"nor for real at {what} {sizes[0]} ({type(error).__name__}: {error}).\n"
            "Are these its inputs, and does loss take its output?"
        ) from error
    peak, error_share = fit(sizes, peaks, wanted, degree=1 if what == "batch size" else 2)
    how = f"from real steps at {what} {', '.join(map(str, sizes))}: fake tensors could not be used ({why})"
    return Forecast(peak, what, wanted, sizes[-1], peaks[-1], how, error_share)


def fit(sizes: Sequence[int], peaks: Sequence[float], wanted: int, *, degree: int) -> tuple[int, float | None]:
    """The value at `wanted` of the polynomial through the last points, and how far one through those before misses the last.

    The last, since a peak is the highest of several moments: at small sizes it may be one that hardly grows (an optimizer's step).
    """
    num = min(degree + 1, len(sizes))
    value = np.polyval(np.polyfit(sizes[-num:], peaks[-num:], num - 1), wanted)
    error = None
    if len(sizes) > 2:
        before = min(num, len(sizes) - 1)
        guess = np.polyval(np.polyfit(sizes[-1 - before : -1], peaks[-1 - before : -1], before - 1), sizes[-1])
        error = abs(float(guess) - peaks[-1]) / max(1.0, float(peaks[-1]))
    return max(0, round(float(value))), error


def _shapes(inputs: Any) -> str:
    return ", ".join(str(list(tensor.shape)) for _, tensor in find_tensors(inputs)) or "no tensors"
