"""The batch: statistics and a content hash of its tensors and of the model's inputs; whether its samples are all equal, and its labels."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from sonde.capture.class_labels_from_loss import ClassLabels, count_labels, find_labels, is_plain
from sonde.capture.probes.probe import Probe, ProbeContext
from sonde.events import BATCH_FIELDS, BatchInspected, Kind, Site
from sonde.runlog.record_format import FramePlan
from sonde.statistics.batched_device_reads import on_device
from sonde.statistics.content_hash import content_hash
from sonde.statistics.find_tensors import find_tensors, numpy_view, shape_of
from sonde.statistics.statistics_without_extension import unsupported_reason
from sonde.statistics.tensor_statistics_table import StatisticsTable

MAX_TENSORS = 8  # of one batch, and of one model's inputs
NUM_FIRST_STEPS = 16  # observed steps; then those at this distance: hashing a batch costs as much as all statistics of a small layer
MIN_DISTANCE = 32  # steps
MAX_SAMPLES = 64  # of a batch are compared with the first, until one differs
MAX_OUTPUTS = 4  # whose shapes are stored, to recognize the labels
MAX_CALLS = 16  # of the first model whose samples are compared: a rollout or a decoder begins with the same state each time


@dataclass
class ComparedSamples:
    """The samples of one call of a model."""

    size: int = 0  # samples
    are_equal: dict[tuple[int, int], bool] = field(default_factory=dict)  # by place in memory: inputs that tell samples apart
    contents: list[int | None] = field(default_factory=list)  # hash of one sample, of each input whose samples are all equal
    is_row: bool = False  # a single dimension of floats: the samples, or the numbers of one sample (a state)

    @property
    def is_constant(self) -> bool:
        return bool(self.are_equal) and all(self.are_equal.values())

    def is_same_as(self, other: "ComparedSamples") -> bool:
        return other.is_constant and other.contents == self.contents


class BatchProbe(Probe):
    """Measures the tensors of a batch and of a model's inputs, and compares its samples and labels."""

    name = "batch_contents"
    OBSERVED_ONLY = True

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._sites: dict[str, Site | None] = {}
        self._table = StatisticsTable(2 * MAX_TENSORS)
        self._extra = np.zeros((2 * MAX_TENSORS, 2))
        self._measured_sites: list[Site] = []
        self._plan: tuple[list[int], FramePlan] | None = None
        self._num_steps = 0
        self._last_step = 0
        self._is_active = True
        self._batch: Any = None  # the loader's last batch before the first training forward of the step, so not one of a validation
        self._num_fetched = 0  # batches up to that forward: several, where several loaders feed it or a validation came before
        self._fetched: dict[int, torch.Tensor] = {}  # tensors of the batch, by id: as inputs they are not measured again
        self._samples: ComparedSamples | None = None  # of the first forward
        self._first_module = 0  # id of the module that it ran
        self._num_calls = 0  # of this module whose samples were compared
        self._varies = False  # a later call of it got another sample
        self._outputs: list[tuple[int, ...]] = []
        self._labels: list[ClassLabels | None] = []

    @property
    def is_enabled(self) -> bool:
        return self._context.measured.batches

    def on_step_start(self) -> None:
        self._num_steps += 1
        is_due = self._num_steps <= NUM_FIRST_STEPS or self._state.number - self._last_step >= MIN_DISTANCE
        self._is_active = is_due or self._context.measured.in_full
        self._last_step = self._state.number if self._is_active else self._last_step

    def on_batch_end(self, batch: Any) -> None:
        if self._is_active and self._samples is None:
            self._batch = batch
            self._num_fetched += batch is not None

    def on_forward_start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_active:
            return
        if not self._state.is_first_forward:
            self._compare_with_first_call(module, args, kwargs)
            return
        self._measure_batch()
        inputs = find_tensors((args, kwargs))[:MAX_TENSORS]
        if self._samples is None:
            readable = [tensor for _, tensor in inputs if not on_device(tensor)] or list(self._fetched.values())[:1]
            self._samples = _compare_samples(readable)
            self._first_module, self._num_calls = id(module), 1
        for place, tensor in inputs:
            if id(tensor) not in self._fetched:
                self._measure(f"input.{place.partition('.')[2]}", tensor)

    def on_forward_end(self, module: nn.Module, output: Any) -> None:
        if not self._is_active or not self._state.is_first_forward or len(self._outputs) >= MAX_OUTPUTS:
            return
        shapes = [shape_of(tensor) for _, tensor in find_tensors(output)[:MAX_OUTPUTS]]
        self._outputs += shapes
        samples = self._samples if id(module) == self._first_module else None
        if samples is not None and samples.is_row and not any(len(shape) > 1 and shape[0] == samples.size for shape in shapes):
            samples.are_equal.clear()  # the output has no row for each number of the input: they are one sample

    def on_backward_start(self, tensors: Any) -> None:
        if self._is_active:
            found = find_labels(tensors, self._outputs, self._fetched.values())
            self._labels += found
            are_equal = self._samples.are_equal if self._samples else {}
            for labels in found:  # a model that computes its loss itself gets them as an input too, after the first
                if labels is not None and labels.location in list(are_equal)[1:]:
                    del are_equal[labels.location]

    def tables(self) -> Iterable[StatisticsTable]:
        self._measure_batch()  # no model was called
        return (self._table,)

    def collect(self) -> None:
        step = self._state.number
        if ids := [site.id for site in self._measured_sites]:
            if self._plan is None or self._plan[0] != ids:
                self._plan = (ids, self._recorder.plan(Kind.BATCH, BATCH_FIELDS, ids))
            self._recorder.frame(self._plan[1], step, np.hstack([self._table.values[: len(ids)], self._extra[: len(ids)]]))
        if (samples := self._samples) is not None:
            num_alike = 0 if self._varies else sum(samples.are_equal.values())
            event = BatchInspected(
                num_fetched=self._num_fetched, num_inputs=len(samples.are_equal), num_alike=num_alike, size=samples.size,
                sample=next(iter(samples.contents), None), labels=count_labels(self._labels),
            )  # fmt: skip
            self._recorder.emit(event, step)

    def reset(self) -> None:
        self._batch, self._num_fetched, self._samples, self._varies = None, 0, None, False
        for held in (self._measured_sites, self._fetched, self._outputs, self._labels):
            held.clear()

    def _compare_with_first_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Parallel environments start in one state, and a decoder starts from zeros: only what all calls get is what the model gets."""
        first = self._samples
        if first is None or id(module) != self._first_module or self._varies or not first.is_constant or self._num_calls >= MAX_CALLS:
            return
        self._num_calls += 1
        inputs = [tensor for _, tensor in find_tensors((args, kwargs))[:MAX_TENSORS] if not on_device(tensor)]
        if inputs:
            self._varies = not first.is_same_as(_compare_samples(inputs))

    def _measure_batch(self) -> None:
        batch, self._batch = self._batch, None
        if batch is not None:
            for place, tensor in find_tensors(batch)[:MAX_TENSORS]:
                self._measure(f"batch.{place}", tensor)
                self._fetched[id(tensor)] = tensor

    def _measure(self, path: str, tensor: torch.Tensor) -> None:
        row = len(self._measured_sites)
        if row >= len(self._extra) or any(site.path == path for site in self._measured_sites):
            return
        if path not in self._sites:
            reason = unsupported_reason(tensor)
            self._sites[path] = None if reason else self._recorder.site(
                kind="input", path=path, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch.")
            )  # fmt: skip
        site = self._sites[path]
        if site is not None:
            self._table.measure_one(row, tensor)
            fingerprint = content_hash(tensor) if not on_device(tensor) else None
            self._extra[row] = ((shape_of(tensor) or (1,))[0], np.nan if fingerprint is None else fingerprint)
            self._measured_sites.append(site)


def _hash_of_sample(sample: torch.Tensor) -> int | None:
    """A hash in which 0 and -0 are equal: an input that was multiplied by 0 has both, at other places in each batch."""
    with torch.no_grad():
        return content_hash(sample + 0 if sample.is_floating_point() else sample)


def _compare_samples(inputs: list[torch.Tensor]) -> ComparedSamples:
    """Which inputs distinguish samples, and whether all samples are equal in them. Such inputs have as many rows as the first, or another
    shape than one sample."""
    inputs = [tensor for tensor in inputs if tensor.dim()]
    samples = ComparedSamples(shape_of(inputs[0])[0] if inputs else 0)
    if samples.size < 2:
        return samples
    samples.is_row = inputs[0].dim() == 1 and inputs[0].is_floating_point()
    for number, tensor in enumerate(inputs):
        if not is_plain(tensor):
            samples.are_equal[-number, 0] = False  # not known
        elif len(tensor) == samples.size:
            rows = numpy_view(tensor)
            is_equal = all(bool((rows[i] == rows[0]).all()) for i in range(1, min(samples.size, MAX_SAMPLES)))
            samples.are_equal[tensor.data_ptr(), tensor.numel()] = is_equal
            if is_equal:
                samples.contents.append(_hash_of_sample(tensor[0]))
        elif tensor.numel() and not {*tensor.shape} <= {1, *shape_of(inputs[0])[1:]}:
            values = numpy_view(tensor)
            samples.are_equal[tensor.data_ptr(), tensor.numel()] = bool((values == values.flat[0]).all())
    return samples
