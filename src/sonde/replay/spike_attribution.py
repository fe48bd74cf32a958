"""Attributes a spike of the loss or of the gradient norm to samples of the batch, and to the input, target or layer where they deviate.

The step is replayed as for a non-finite number (`replay_step`), as a whole and without parts of its batch. If it cannot run again, the
model runs alone on its inputs, and else only the gradients are read; caveats of the result say why.
"""

from __future__ import annotations

import linecache
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from math import isfinite, sqrt
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from sonde.capture.step_inputs_for_replay import ReplayBuffer
from sonde.errors import CannotReplay
from sonde.nonfinite.module_stack import join_path
from sonde.nonfinite.operation_tracer import compile_disabled
from sonde.nonfinite.origin_from_operation import summarize
from sonde.nonfinite.origin_types import TensorSummary
from sonde.replay.bisect_batch import FoundSamples, find_heaviest_samples
from sonde.replay.dataset_indices_of_samples import dataset_indices
from sonde.replay.prevent_side_effects import describe_failure
from sonde.replay.replay_without_other_ranks import caveats_of_ranks, forbid_collectives, without_ddp
from sonde.replay.rerun_statements import Rerun, gradients_by_leaf, value_queries
from sonde.replay.select_samples_of_batch import select_samples, step_inputs
from sonde.replay.statements_that_compute_loss import FrameSlice, slices_up_to_backward
from sonde.spike_detection import Spike
from sonde.statistics import reductions
from sonde.statistics.find_tensors import find_tensors
from sonde.statistics.private_torch_api import graph_task_id

OUTLIER_FACTOR = 10.0  # times the magnitude of the other samples: rows of one dataset differ by less
OUTPUT_OUTLIER_FACTOR = 4.0  # the same for the output of a layer: the layers before it reduce the difference
SAME_VALUE = 0.01  # relative difference: a replay with another value is not the same step
SUM_TOLERANCE = 0.2  # share of the excess: if two halves miss the whole by more than that, the samples do not add up
MAX_REPORTED = 64  # parameters in an event
TINY = 1e-30  # divisor instead of zero
MAX_LAYERS = 400  # calls of layers in one forward that are measured


@dataclass(frozen=True, slots=True)
class SampleDeviation:
    """The input, target or layer output in which the responsible samples differ from the other samples of the batch."""

    name: str
    size: float  # mean absolute value of the responsible samples
    others: float  # the usual one of the other samples


@dataclass(frozen=True, slots=True)
class Blame:
    """The cause of a spike, as plain data that a run can store."""

    samples: tuple[int, ...] | None = None  # indices in the batch, the heaviest first; (): spread over the batch; None: unknown
    shares: tuple[float, ...] = ()  # of the excess over the usual value, one per sample
    indices: tuple[int, ...] | None = None  # the dataset indices of these samples, if known
    batch_size: int = 0
    without: float | None = None  # the loss or the gradient norm without these samples
    blame: str = ""  # "input" | "target" | "layer" | "slope" | "batch" | "update" (the batch is that of the step before); "": unknown
    layer: str = ""  # dotted path, if a layer is responsible
    odd: SampleDeviation | None = None  # where the samples differ from the others
    gradients: tuple[tuple[str, float], ...] = ()  # norms by parameter, the largest first
    inputs: tuple[TensorSummary, ...] = ()  # of the model
    source: str = ""  # "train.py:41": the line that computes the loss
    text: str = ""
    how: str = "replayed"  # "replayed" | "model" | "gradients": what the attribution is based on
    caveats: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def attribute_spike(
    buffer: ReplayBuffer, *, frame: FrameType | None, what: str, leap: Spike, models: Mapping[str, nn.Module]
) -> Blame:
    """Attributes the spike `leap` of the recorded step to samples and layers. Call it in a copy of the process. `frame` is the function of
    the user that called `backward`, `what` is "loss" or "gradient", `models` are the watched models by name."""
    modules = [*models.values(), *(call.module for call in buffer.calls)]
    replay = _SpikeReplay(buffer, what, leap, models)
    try:
        with without_ddp(modules), compile_disabled(), forbid_collectives():
            found = replay.attribute(frame)
    except CannotReplay as error:
        found = blame_gradients(models, what, str(error))
    return replace(found, caveats=(*found.caveats, *caveats_of_ranks()))


class _SpikeReplay:
    """Replays one step and attributes its spike."""

    def __init__(self, buffer: ReplayBuffer, what: str, leap: Spike, models: Mapping[str, nn.Module]) -> None:
        self.buffer, self.what, self.leap, self.models = buffer, what, leap, models
        self.value, self.usual = leap.value, leap.usual
        self.caveats: list[str] = []
        self.num = 0  # samples in the batch
        self.dim = 0  # dimension of the samples in the inputs
        self.is_sum = False  # the loss is the sum over the samples; else their mean
        self.direction: dict[int, Tensor] = {}  # unit gradient of the whole batch, by id of the parameter
        self.names = {id(p): join_path(name, path) for name, model in models.items() for path, p in model.named_parameters()}

    def attribute(self, frame: FrameType | None) -> Blame:
        """Replays as much of the step as possible: all of it, else the model, else nothing."""
        try:
            slices = slices_up_to_backward(frame, self.what, value_queries(self.buffer), self.buffer.loss_frame)
            return self._replay_whole_step(Rerun(self.buffer, slices))
        except Exception as error:  # raised by the user's code in the replay: its result cannot be trusted
            reason = describe_failure(error)
        try:
            return self._replay_model(Rerun(self.buffer, ()), reason)
        except Exception:
            return blame_gradients(self.models, self.what, reason)

    # ---- the whole step

    def _replay_whole_step(self, rerun: Rerun) -> Blame:
        inputs = step_inputs(rerun)
        self.num, self.dim = _batch_size(inputs)
        with layer_magnitudes(self.models, self.num) as layers:
            loss = rerun()
        if not rerun.num_calls and rerun.reads_graph:
            raise CannotReplay("; ".join(rerun.notes[:3]) or "the loss is computed from outputs that the model gave before")
        found = gradients_by_leaf(loss)
        value = _norm(gradient for _, gradient in found) if self.what == "gradient" else float(loss.detach())
        if not isfinite(value) or abs(value - self.value) > SAME_VALUE * abs(self.value):
            self._check_other_value(value, rerun)
        norms = self._norms_by_parameter(found)
        if self.what == "gradient":
            self.direction = {id(leaf): gradient / value for leaf, gradient in found}
        del loss, found
        source, text = _loss_line(rerun.slices)
        layer = _owner(norms[0][0]) if self.what == "gradient" and norms else ""
        shown, summaries = norms[:MAX_REPORTED], self._summarize_inputs(rerun)
        blame = Blame(layer=layer, gradients=shown, inputs=summaries, batch_size=self.num, source=source, text=text)
        if self.buffer.has_same_batch:  # without a spike there: what has changed since is the weights
            return replace(blame, blame="update", caveats=tuple(rerun.notes[:3]))
        heaviest = self._find_samples(rerun, value, inputs)
        self.caveats += [heaviest.note] if heaviest.note else []
        if heaviest.samples:
            blame = replace(blame, samples=heaviest.samples, shares=heaviest.shares)
            blame = self._explain_samples(blame, rerun, layers, norms, inputs)
        elif heaviest.samples == ():
            blame = replace(blame, samples=(), blame="batch")
        return replace(blame, caveats=(*self.caveats, *rerun.notes[:3]))

    def _check_other_value(self, value: float, rerun: Rerun) -> None:
        """The replay has another value: raises `CannotReplay`, unless this is one of several backwards of the step and large itself."""
        number = "loss" if self.what == "loss" else "gradient norm"
        message = f"the step was run again and its {number} was {value:.4g}, not {self.value:.4g}"
        if self.what == "loss" or not value > (self.value + self.usual) / 2:
            raise CannotReplay(message + "".join(f"; {note}" for note in rerun.notes[:3]))
        self.caveats.append(f"{message}: it does not include other backwards of the step, or later changes of the gradients")

    # ---- samples

    def _find_samples(self, rerun: Rerun, whole: float, inputs: Sequence[Tensor]) -> FoundSamples:
        heaviest = self._find_samples_along_dim(rerun, whole)
        if heaviest.samples is None and heaviest.note and self.dim == 0 and inputs and inputs[0].dim() > 2:  # dimension 0 may be time
            self.num, self.dim = inputs[0].shape[1], 1
            other = self._find_samples_along_dim(rerun, whole)
            if other.samples is not None:
                return other
            self.num, self.dim = inputs[0].shape[0], 0
        return heaviest

    def _find_samples_along_dim(self, rerun: Rerun, whole: float) -> FoundSamples:
        num, excess = self.num, whole - self.usual
        if num < 2:
            return FoundSamples(None, "" if num else "no batch was found among the inputs of the step")
        value_of = cache(partial(self._value_of, rerun))
        try:
            halves = value_of(tuple(range(num // 2))), value_of(tuple(range(num // 2, num)))
        except Exception as error:
            return FoundSamples(None, f"parts of the batch could not be run ({type(error).__name__}: {error})"[:300])
        mean = halves[0] * (num // 2) / num + halves[1] * (num - num // 2) / num
        self.is_sum = abs(sum(halves) - whole) < abs(mean - whole)
        if min(abs(sum(halves) - whole), abs(mean - whole)) > SUM_TOLERANCE * abs(excess):
            self.caveats.append("the samples do not add up to the whole: they are normalized or compared with each other")

        def decrease_without(group: Sequence[int]) -> float:
            rest = tuple(sorted(set(range(num)) - set(group)))
            return whole - value_of(rest) * (1.0 if self.is_sum else len(rest) / num)

        return find_heaviest_samples(num, excess, decrease_without)

    def _value_of(self, rerun: Rerun, samples: Sequence[int]) -> float:
        """The loss of some samples; or the component of their gradient along that of the whole batch, which adds up as norms do not."""
        loss = self._loss_of(rerun, samples)
        if self.what == "loss":
            return float(loss.detach())
        found = gradients_by_leaf(loss)
        return sum(float((gradient * self.direction[id(leaf)]).sum()) for leaf, gradient in found if id(leaf) in self.direction)

    def _loss_of(self, rerun: Rerun, samples: Sequence[int]) -> Tensor:
        indices = torch.tensor(samples)
        return rerun(lambda value, flat: select_samples(value, indices, self.num, self.dim, flat=flat))

    def _explain_samples(
        self, blame: Blame, rerun: Rerun, layers: Sequence[SampleMagnitudes], norms: Sequence[tuple[str, float]], inputs: Sequence[Tensor]
    ) -> Blame:
        """Adds the value without the samples, and the input, target or layer in which they differ from the others."""
        samples = blame.samples or ()
        rest = sorted(set(range(self.num)) - set(samples))
        loss = self._loss_of(rerun, rest)
        layer, without = blame.layer, float(loss.detach())
        if self.what == "gradient":
            found = gradients_by_leaf(loss)
            layer, without = _most_changed_layer(norms, dict(self._norms_by_parameter(found))), _norm(gradient for _, gradient in found)
        blame = replace(blame, layer=layer, without=without, batch_size=self.num)
        if len(samples) > 1 and without > self.leap.bound:  # the rest of the batch is a spike too
            return replace(blame, samples=(), shares=(), blame="batch", without=None)
        blame = replace(blame, indices=dataset_indices(samples, inputs, self.num))
        for kind, name, tensor in self._named_inputs(rerun):
            magnitudes = sample_magnitudes(name, tensor, self.num)
            own, usual = magnitudes.compare(samples) if magnitudes else (0.0, 0.0)
            if ratio(own, usual) > OUTLIER_FACTOR:
                return replace(blame, blame=kind, odd=SampleDeviation(name, own, usual))
        deviation = find_deviating_layer(layers, samples, OUTPUT_OUTLIER_FACTOR)
        if deviation is None:
            return replace(blame, blame="target" if self.what == "loss" else "slope")
        return replace(blame, blame="layer", layer=blame.layer or deviation.name, odd=deviation)

    # ---- fallbacks

    def _replay_model(self, rerun: Rerun, reason: str) -> Blame:
        """Runs the model alone and searches samples with unusual inputs or layer outputs."""
        inputs = [(name, tensor) for _, name, tensor in self._named_inputs(rerun)]
        self.num = inputs[0][1].shape[0] if inputs else 0
        with layer_magnitudes(self.models, self.num) as layers:
            rerun.model_outputs()
        blame = replace(blame_gradients(self.models, self.what, reason), how="model", inputs=self._summarize_inputs(rerun))
        if self.num < 2:
            return blame
        measured = [*(sample_magnitudes(name, tensor, self.num) for name, tensor in inputs), *layers]
        for position, magnitudes in enumerate(measured):
            outliers = magnitudes.outliers(OUTLIER_FACTOR) if magnitudes else ()
            if magnitudes and outliers and len(outliers) <= self.num / 4:
                own, usual = magnitudes.compare(outliers)
                kind = "input" if position < len(inputs) else "layer"
                indices = dataset_indices(outliers, [tensor for _, tensor in inputs], self.num)
                return replace(
                    blame, samples=outliers, indices=indices, blame=kind, layer="" if kind == "input" else magnitudes.name,
                    odd=SampleDeviation(magnitudes.name, own, usual), batch_size=self.num,
                )  # fmt: skip
        return blame

    # ---- names

    def _named_inputs(self, rerun: Rerun) -> Iterator[tuple[str, str, Tensor]]:
        """The inputs of the step as ("input" or "target", name, tensor). A name is that of the user's variable, if there is one."""
        variable_names = {id(value): name for part in rerun.slices for name, value in part.variables.items() if isinstance(value, Tensor)}
        yielded: set[int] = set()
        for call in self.buffer.calls:
            for path, tensor in find_tensors((call.args, call.kwargs)):
                if tensor.dim() and id(tensor) not in yielded:
                    yielded.add(id(tensor))
                    yield "input", variable_names.get(id(tensor), f"input {path.partition('.')[2]}"), tensor
        for part in rerun.slices:
            for name in sorted(part.slice.inputs):
                value = part.variables.get(name)
                if isinstance(value, Tensor) and value.dim() and id(value) not in yielded and not value.requires_grad:
                    yielded.add(id(value))
                    yield "target", name, value

    def _summarize_inputs(self, rerun: Rerun) -> tuple[TensorSummary, ...]:
        named = self._named_inputs(rerun)
        return summarize({name: tensor for kind, name, tensor in named if kind == "input" and tensor.is_floating_point()})

    def _norms_by_parameter(self, found: Sequence[tuple[Tensor, Tensor]]) -> tuple[tuple[str, float], ...]:
        return _largest_first((self.names[id(leaf)], _norm([gradient])) for leaf, gradient in found if id(leaf) in self.names)


def blame_gradients(models: Mapping[str, nn.Module], what: str, reason: str) -> Blame:
    """Attributes a spike of the gradient norm by the present gradients, without running anything. `reason`: why nothing runs."""
    named = [(join_path(name, path), p.grad) for name, model in models.items() for path, p in model.named_parameters()]
    norms = _largest_first((path, _norm([gradient])) for path, gradient in named if gradient is not None) if what == "gradient" else ()
    caveat = f"the step could not be run again: {reason}"
    return Blame(gradients=norms[:MAX_REPORTED], layer=_owner(norms[0][0]) if norms else "", how="gradients", caveats=(caveat,))


def _largest_first(norms: Iterable[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(norms, key=lambda pair: -pair[1]))


def _norm(tensors: Any) -> float:
    return sqrt(reductions.check_finite(list(tensors))[0])


def _most_changed_layer(norms: Sequence[tuple[str, float]], others: Mapping[str, float]) -> str:
    """The layer whose gradient changes most without the samples, among those with at least a tenth of the whole norm."""
    total = sqrt(sum(norm * norm for _, norm in norms))
    ratios = [(norm / max(others.get(name, 0.0), TINY), name) for name, norm in norms if norm >= 0.1 * total]
    return _owner(max(ratios, key=lambda pair: pair[0], default=(0.0, ""))[1])


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _loss_line(slices: Sequence[FrameSlice]) -> tuple[str, str]:
    """The line that computes the loss, as ("train.py:41", text): the last simple statement of the slices before `backward`."""
    for part in reversed(slices):
        file, below = part.slice.code.co_filename, part.slice.lines[-1]
        every = [line for *_, line in part.slice.code.co_lines() if line]
        for number in reversed(part.slice.lines[:-1]):
            text = linecache.getline(file, number).strip()
            if text.startswith(("with ", "async with ")):
                number = max(line for line in every if number <= line < below)
                text = linecache.getline(file, number).strip()
            if not text.startswith(("if ", "for ", "while ", "try:")):  # it is unknown which of their statements ran
                return f"{Path(file).name}:{number}", text
            below = number
    file, number = slices[0].slice.code.co_filename, slices[0].slice.lines[-1]
    return f"{Path(file).name}:{number}", linecache.getline(file, number).strip()


def _batch_size(inputs: Sequence[Tensor]) -> tuple[int, int]:
    """The size of the batch and its dimension in the first input: dimension 1 if more of the other inputs have that size."""
    if not inputs:
        return 0, 0
    first = inputs[0]
    num_same = [sum(size in tensor.shape[:1] for tensor in inputs[1:]) for size in first.shape[:2]]
    dim = 1 if first.dim() > 2 and num_same[1] > num_same[0] else 0
    return first.shape[dim], dim


# ---- magnitudes of samples


@dataclass(frozen=True, slots=True)
class SampleMagnitudes:
    """The mean absolute value of each sample in a tensor."""

    name: str
    values: tuple[float, ...]

    def compare(self, samples: Collection[int]) -> tuple[float, float]:
        """The largest magnitude of these samples, and the median of the others."""
        others = [value for sample, value in enumerate(self.values) if sample not in samples]
        return max(self.values[sample] for sample in samples), median(others) if others else 0.0

    def outliers(self, factor: float) -> tuple[int, ...]:
        """The samples with more than `factor` times the median magnitude."""
        usual = median(self.values)
        return tuple(sample for sample, value in enumerate(self.values) if value > factor * usual > 0)


def sample_magnitudes(name: str, tensor: Tensor, num: int) -> SampleMagnitudes | None:
    """The magnitudes of `num` samples; None if no dimension of the tensor has that size, or if it is empty or not floating point."""
    if num not in tensor.shape[:2] or not tensor.is_floating_point() or tensor.numel() == 0:
        return None
    dim = tensor.shape.index(num)
    with torch.no_grad():
        rows = tensor.detach().movedim(dim, 0).reshape(num, -1)
        return SampleMagnitudes(name, tuple(rows.abs().to(torch.float64).mean(1).tolist()))


@contextmanager
def layer_magnitudes(models: Mapping[str, nn.Module], num: int) -> Iterator[list[SampleMagnitudes]]:
    """Measures the outputs of layers per sample, by forward hooks, in the order of execution."""
    outputs: list[SampleMagnitudes] = []

    def on_forward_end(path: str, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or graph_task_id() != -1 or len(outputs) >= MAX_LAYERS:
            return  # a graph task is running: backward recomputes a checkpointed part of the forward
        measured = [sample_magnitudes(path, tensor, num) for _, tensor in find_tensors(output)[:1]]
        outputs.extend(filter(None, measured))

    with ExitStack() as stack:
        for name, model in models.items():
            for path, module in model.named_modules():
                if not module._modules or module._parameters:
                    hook = partial(on_forward_end, join_path(name, path))
                    stack.callback(module.register_forward_hook(hook).remove)
        yield outputs


def find_deviating_layer(layers: Sequence[SampleMagnitudes], samples: Collection[int], min_ratio: float) -> SampleDeviation | None:
    """The layer at which the ratio between the samples and the others grows most; None if it stays below `min_ratio`."""
    found: SampleDeviation | None = None
    steepest, before = 0.0, 1.0
    for magnitudes in layers:
        own, others = magnitudes.compare(samples)
        if not others > 0:
            continue
        now = ratio(own, others)
        if now >= min_ratio and now / before > steepest:
            steepest, found = now / before, SampleDeviation(magnitudes.name, own, others)
        before = now
    return found


def ratio(value: float, other: float) -> float:
    """How many times larger or smaller one value is than the other; at least 1."""
    return max(value, other, TINY) / max(min(value, other), TINY)
