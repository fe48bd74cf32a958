"""What went in: shape, range, non-finite values and a content hash of the tensors in a batch; are its samples alike, and its labels?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from sonde.capture.class_labels import Labels, count_labels, find_labels, is_plain
from sonde.capture.probes.base import Probe, ProbeContext
from sonde.events import BATCH_FIELDS, BatchInspected, Kind, Site
from sonde.runlog.format import FramePlan
from sonde.statistics.deferred_reads import on_device
from sonde.statistics.fingerprint import content_hash
from sonde.statistics.table import StatisticsTable
from sonde.statistics.tensor_utils import find_tensors
from sonde.statistics.torch_ops import unsupported_reason

MAX_TENSORS = 8  # of one batch, and of one model's inputs
NUM_FIRST_STEPS = 16  # observed steps; then those at this distance: hashing a batch costs as much as all statistics of a small layer
MIN_DISTANCE = 32  # steps
MAX_SAMPLES = 64  # of a batch are compared with the first; the second alone where that differs
MAX_OUTPUTS = 4  # of the models of a step, whose shapes are kept


class BatchProbe(Probe):
    """Measures the tensors of a batch and of a model's inputs, and compares its samples and labels."""

    name = "batch"
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
        self._batch: Any = None  # what the loader handed out last, before the training's first forward: not what is validated with
        self._num_fetched = 0  # up to that forward: more than one, where several loaders feed it or a validation came before
        self._fetched: dict[int, torch.Tensor] = {}  # its tensors, by id: as inputs they are not measured again
        self._samples: dict[str, Any] = {}  # of what was given to the first forward
        self._are_samples_alike: dict[tuple[int, int], bool] = {}  # its inputs that can tell samples apart, by their place: do they not?
        self._outputs: list[tuple[int, ...]] = []
        self._labels: list[Labels | None] = []

    @property
    def is_enabled(self) -> bool:
        return self._context.measured.batches

    def on_step_start(self) -> None:
        step = self._state.number
        self._num_steps += 1
        is_due = self._num_steps <= NUM_FIRST_STEPS or step - self._last_step >= MIN_DISTANCE
        self._is_active = is_due or self._context.measured.in_full
        if self._is_active:
            self._last_step = step

    def on_batch_end(self, batch: Any) -> None:
        if self._is_active and not self._samples:
            self._batch = batch
            self._num_fetched += batch is not None

    def on_forward_start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_active or not self._state.is_first_forward:
            return
        self._measure_batch()
        inputs = find_tensors((args, kwargs))[:MAX_TENSORS]
        if not self._samples:
            near = [tensor for _, tensor in inputs if not on_device(tensor)] or list(self._fetched.values())[:1]
            self._samples, self._are_samples_alike = _compare_samples(near)
        for place, tensor in inputs:
            if id(tensor) not in self._fetched:
                self._measure(f"input.{place.partition('.')[2]}", tensor)

    def on_forward_end(self, module: nn.Module, output: Any) -> None:
        if self._is_active and self._state.is_first_forward and len(self._outputs) < MAX_OUTPUTS:
            self._outputs += [tuple(tensor.shape) for _, tensor in find_tensors(output)[:MAX_OUTPUTS]]

    def on_backward_start(self, tensors: Any) -> None:
        if self._is_active:
            found = find_labels(tensors, self._outputs, self._fetched.values())
            self._labels += found
            for labels in found:  # a model that computes its loss itself is given them too; its first input is what it learns from
                if labels is not None and labels.place in list(self._are_samples_alike)[1:]:
                    del self._are_samples_alike[labels.place]

    def tables(self) -> Iterable[StatisticsTable]:
        self._measure_batch()  # where no model was called
        return (self._table,)

    def collect(self) -> None:
        step = self._state.number
        if self._measured_sites:
            num = len(self._measured_sites)
            ids = [site.id for site in self._measured_sites]
            if self._plan is None or self._plan[0] != ids:
                self._plan = (ids, self._recorder.plan(Kind.BATCH, BATCH_FIELDS, ids))
            self._recorder.frame(self._plan[1], step, np.hstack([self._table.values[:num], self._extra[:num]]))
        if self._samples:
            event = BatchInspected(
                num_fetched=self._num_fetched, num_inputs=len(self._are_samples_alike), num_alike=sum(self._are_samples_alike.values()),
                size=self._samples["size"], sample=self._samples["sample"], labels=count_labels(self._labels),
            )  # fmt: skip
            self._recorder.emit(event, step)

    def reset(self) -> None:
        self._batch, self._num_fetched = None, 0
        for held in (self._measured_sites, self._fetched, self._samples, self._are_samples_alike, self._outputs, self._labels):
            held.clear()

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
            self._extra[row] = (tensor.shape[0] if tensor.dim() else 1, np.nan if fingerprint is None else fingerprint)
            self._measured_sites.append(site)


def _compare_samples(inputs: list[torch.Tensor]) -> tuple[dict[str, Any], dict[tuple[int, int], bool]]:
    """How many samples there are, and what one of them is where they are alike in an input; then the inputs that can tell samples apart, by
    their place in memory: are all samples alike in it?

    Those with as many rows as the first, and what is neither that nor a mask or a position, in the shape of one sample: a hidden state has
    its samples in another dimension, the edges of a graph say how its nodes differ. Such a one says nothing where it is one number.
    """
    inputs = [tensor for tensor in inputs if tensor.dim()]
    size = len(inputs[0]) if inputs else 0
    told: dict[str, Any] = {"size": size, "sample": None}
    judged: dict[tuple[int, int], bool] = {}
    for number, tensor in enumerate(inputs if size > 1 else ()):
        if not is_plain(tensor):
            judged[-number, 0] = False  # it cannot be told
        elif len(tensor) == size:
            alike = judged[tensor.data_ptr(), tensor.numel()] = _are_alike(tensor.detach().numpy())
            if alike and told["sample"] is None:
                told["sample"] = content_hash(tensor[0])
        elif tensor.numel() and not {*tensor.shape} <= {1, *inputs[0].shape[1:]}:
            values = tensor.detach().numpy()
            judged[tensor.data_ptr(), tensor.numel()] = bool((values == values.flat[0]).all())
    return told, judged


def _are_alike(rows: np.ndarray[Any, Any]) -> bool:
    return all(bool((rows[i] == rows[0]).all()) for i in range(1, min(len(rows), MAX_SAMPLES)))
