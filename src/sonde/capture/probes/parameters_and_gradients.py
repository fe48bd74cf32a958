"""Statistics of every parameter, its gradient and its update, taken around the optimizer's step in a few batched calls.

Gradients are measured when the optimizer is about to use them: after accumulation, unscaling and clipping, and in compiled models too.
"""

import operator
import weakref
from collections.abc import Iterable

import numpy as np
import torch

from sonde.capture.probes.probe import Probe, ProbeContext
from sonde.capture.record_exponent_histograms import ExponentHistograms
from sonde.capture.zero_grad_tracking import optimizer_parameters
from sonde.events import STATISTICS, Kind, Site
from sonde.runlog.record_format import FramePlan
from sonde.statistics.parameter_snapshot import ParameterSnapshot
from sonde.statistics.tensor_statistics_table import StatisticsTable

UNOWNED = -1  # key of the block of parameters that no optimizer holds
_KINDS = (Kind.PARAMETER, Kind.GRADIENT, Kind.UPDATE)


class _ParameterBlock:
    """The parameters of one optimizer (or those that none holds): sites and tables, planned once."""

    def __init__(self, parameters: list[torch.Tensor], sites: list[Site], snapshot: ParameterSnapshot) -> None:
        self.refs = [weakref.ref(p) for p in parameters]
        self.site_ids = [site.id for site in sites]
        self.tables = {kind: StatisticsTable(len(parameters)) for kind in _KINDS}
        self.snapshot = snapshot
        self.has_snapshot = False  # taken at the last observed step, for parameters that no optimizer holds
        self.measured: set[str] = set()

    def is_of(self, parameters: list[torch.Tensor]) -> bool:
        return len(parameters) == len(self.refs) and all(map(operator.is_, map(operator.call, self.refs), parameters))


class ParameterProbe(Probe):
    """Measures parameters, their gradients and their updates."""

    name = "parameters_and_gradients"
    OBSERVED_ONLY = True

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._measured = context.measured
        self._blocks: dict[int, _ParameterBlock] = {}
        self._plans: dict[tuple[str, tuple[int, ...]], FramePlan] = {}
        self._histograms = ExponentHistograms()
        self._bytes_left = int(context.config.max_update_memory_mb * 2**20)

    @property
    def is_enabled(self) -> bool:
        return self._measured.weights or self._measured.gradients

    def on_optimizer_step_start(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        parameters = self._context.models.selected_parameters(optimizer_parameters(optimizer))
        block = self._block(id(optimizer), parameters)
        self._measure_parameters(block, parameters)
        if not has_closure:  # else the gradients that count are made inside of it
            self._measure_gradients(block, parameters)
            self._pass_on_check(block, optimizer)

    def on_optimizer_step_end(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = self._context.models.selected_parameters(optimizer_parameters(optimizer))
        block = self._blocks.get(id(optimizer))
        if block is None or not block.is_of(parameters):
            return
        if self._state.has_closure:
            self._measure_gradients(block, parameters)
            self._pass_on_check(block, optimizer)
        if Kind.PARAMETER in block.measured:
            self._measure_updates(block, parameters)

    def _pass_on_check(self, block: _ParameterBlock, optimizer: torch.optim.Optimizer) -> None:
        """The finite check need not read the gradients a second time."""
        has_all = Kind.GRADIENT in block.measured and not self._context.models.are_layers_selected
        check = block.tables[Kind.GRADIENT].finite_check() if has_all else None
        self._state.gradient_check = None if check is None else (optimizer, check)

    def tables(self) -> Iterable[StatisticsTable]:
        if self._context.models.unowned and not self._context.gradients.in_threads:  # another thread may be writing their gradients
            self._measure_unowned(self._context.models.selected_parameters(self._context.models.unowned))
        return [table for block in self._blocks.values() for table in block.tables.values()]

    def collect(self) -> None:
        for kind in _KINDS:
            keys = tuple(key for key, block in self._blocks.items() if kind in block.measured)
            if not keys:
                continue
            plan = self._plans.get((kind, keys))
            if plan is None:
                ids = [site_id for key in keys for site_id in self._blocks[key].site_ids]
                plan = self._plans[kind, keys] = self._recorder.plan(kind, STATISTICS, ids)
            values = [self._blocks[key].tables[kind].values for key in keys]
            self._recorder.frame(plan, self._state.number, values[0] if len(values) == 1 else np.concatenate(values))
        if self._state.with_histograms:
            self._histograms.write(self._recorder, self._state.number)

    def reset(self) -> None:
        for block in self._blocks.values():
            block.measured.clear()
        self._histograms.clear()

    def _measure_parameters(self, block: _ParameterBlock, parameters: list[torch.Tensor]) -> None:
        if self._measured.weights and block.site_ids:
            if block.snapshot.available:
                block.snapshot.take(parameters, block.tables[Kind.PARAMETER], 0)
            else:
                block.tables[Kind.PARAMETER].measure(0, parameters)
            block.measured.add(Kind.PARAMETER)
            self._add_histograms(Kind.PARAMETER, block, parameters)

    def _measure_gradients(self, block: _ParameterBlock, parameters: list[torch.Tensor]) -> None:
        if self._measured.gradients and block.site_ids:
            gradients = [p.grad for p in parameters]
            block.tables[Kind.GRADIENT].measure(0, gradients)
            block.measured.add(Kind.GRADIENT)
            self._add_histograms(Kind.GRADIENT, block, gradients)

    def _measure_updates(self, block: _ParameterBlock, parameters: list[torch.Tensor]) -> None:
        if block.snapshot.available:
            block.snapshot.diff(parameters, block.tables[Kind.UPDATE], 0)
            block.measured.add(Kind.UPDATE)

    def _add_histograms(self, kind: str, block: _ParameterBlock, tensors: list[torch.Tensor] | list[torch.Tensor | None]) -> None:
        if self._state.with_histograms:
            for site_id, tensor in zip(block.site_ids, tensors):
                if tensor is not None:
                    self._histograms.add(kind, site_id, tensor)

    def _measure_unowned(self, parameters: list[torch.Tensor]) -> None:
        """Trainable parameters that no optimizer holds: their gradients, and whether anything changed them since the last observed step."""
        block = self._block(UNOWNED, parameters)
        if block.has_snapshot:
            self._measure_updates(block, parameters)
        self._measure_parameters(block, parameters)
        self._measure_gradients(block, parameters)
        block.has_snapshot = self._measured.weights

    def _block(self, key: int, parameters: list[torch.Tensor]) -> _ParameterBlock:
        block = self._blocks.get(key)
        if block is None or not block.is_of(parameters):
            sites = [site for p in parameters if (site := self._context.models.parameter_site(p)) is not None]
            if len(sites) < len(parameters):
                sites = []  # more sites than a run should hold: these parameters go unmeasured
            num_bytes = sum(p.numel() * p.element_size() for p in parameters if p.is_floating_point())
            snapshot = ParameterSnapshot(self._bytes_left)
            self._bytes_left = max(0, self._bytes_left - num_bytes)
            block = self._blocks[key] = _ParameterBlock(parameters if sites else [], sites, snapshot)
            self._plans.clear()
        return block
