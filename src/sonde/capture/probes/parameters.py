"""Statistics of every parameter, its gradient and its update, taken around the optimizer's step in a few batched calls.

Gradients are read when the optimizer is about to use them: that is after accumulation, unscaling and clipping, and it holds in compiled
models too.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable

import numpy as np
import torch

from sonde.capture.exponent_histograms import Exponents
from sonde.capture.probes.base import Probe, Tools
from sonde.events import STATISTICS, Kind, Site
from sonde.runlog.format import FramePlan
from sonde.statistics.snapshot import ParameterSnapshot
from sonde.statistics.table import StatisticsTable

UNOWNED = -1  # key of the block of parameters that no optimizer holds
_KINDS = (Kind.PARAMETER, Kind.GRADIENT, Kind.UPDATE)


class _Block:
    """The parameters of one optimizer (or those that none owns): sites and rows, planned once."""

    def __init__(self, parameters: list[torch.Tensor], sites: list[Site], kept: ParameterSnapshot) -> None:
        self.refs = [weakref.ref(p) for p in parameters]
        self.site_ids = [site.id for site in sites]
        self.rows = {kind: StatisticsTable(len(parameters)) for kind in _KINDS}
        self.kept = kept
        self.kept_once = False
        self.measured: set[str] = set()

    def is_of(self, parameters: list[torch.Tensor]) -> bool:
        return len(parameters) == len(self.refs) and all(map(operator.is_, map(operator.call, self.refs), parameters))


class Weights(Probe):
    name = "weights"

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._measured = tools.measured
        self.wanted = self._measured.weights or self._measured.gradients
        self._blocks: dict[int, _Block] = {}
        self._plans: dict[tuple[str, tuple[int, ...]], FramePlan] = {}
        self._exponents = Exponents()
        self._with_exponents = False
        self._bytes_left = int(tools.config.max_update_memory_mb * 2**20)

    def begin(self, step: int, *, with_exponents: bool) -> None:
        self._with_exponents = with_exponents

    def before(self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], *, closure: bool) -> None:
        block = self._block(id(optimizer), parameters)
        self._take_parameters(block, parameters)
        if not closure:
            self._take_gradients(block, parameters)

    def after(self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], *, closure: bool) -> None:
        block = self._blocks.get(id(optimizer))
        if block is None or not block.is_of(parameters):
            return
        if closure:
            self._take_gradients(block, parameters)
        if Kind.PARAMETER in block.measured:
            self._take_updates(block, parameters)

    def guarded(self, optimizer: torch.optim.Optimizer) -> tuple[float, int] | None:
        """The guard's answer for this optimizer's gradients, where they have just been measured: on large models a second reading shows."""
        block = self._blocks.get(id(optimizer))
        return block.rows[Kind.GRADIENT].finite_check() if block is not None and Kind.GRADIENT in block.measured else None

    def tables(self) -> Iterable[StatisticsTable]:
        if self._tools.models.unowned:
            self._look_at_unowned(self._tools.models.unowned)
        tables: list[StatisticsTable] = []
        for block in self._blocks.values():
            tables += block.rows.values()
        return tables

    def write(self, step: int) -> None:
        for kind in _KINDS:
            keys: tuple[int, ...] = ()
            tables = []
            for key, block in self._blocks.items():
                if kind in block.measured:
                    keys += (key,)
                    tables.append(block.rows[kind].values)
            if tables:
                plan = self._plans.get((kind, keys))
                if plan is None:
                    ids = [site_id for key in keys for site_id in self._blocks[key].site_ids]
                    plan = self._plans[kind, keys] = self._journal.plan(kind, STATISTICS, ids)
                self._journal.frame(plan, step, tables[0] if len(tables) == 1 else np.concatenate(tables))
        if self._with_exponents:
            self._exponents.write(self._journal, step)

    def clear(self) -> None:
        for block in self._blocks.values():
            block.measured.clear()
        if self._with_exponents:
            self._exponents.clear()

    # -- measuring ---------------------------------------------------------------------------------

    def _take_parameters(self, block: _Block, parameters: list[torch.Tensor]) -> None:
        if self._measured.weights and block.site_ids:
            if block.kept.available:
                block.kept.take(parameters, block.rows[Kind.PARAMETER], 0)
            else:
                block.rows[Kind.PARAMETER].measure(0, parameters)
            block.measured.add(Kind.PARAMETER)
            if self._with_exponents:
                self._take_exponents(Kind.PARAMETER, block, parameters)

    def _take_gradients(self, block: _Block, parameters: list[torch.Tensor]) -> None:
        if self._measured.gradients and block.site_ids:
            gradients = [p.grad for p in parameters]
            block.rows[Kind.GRADIENT].measure(0, gradients)
            block.measured.add(Kind.GRADIENT)
            if self._with_exponents:
                self._take_exponents(Kind.GRADIENT, block, gradients)

    def _take_updates(self, block: _Block, parameters: list[torch.Tensor]) -> None:
        if block.kept.available:
            block.kept.diff(parameters, block.rows[Kind.UPDATE], 0)
            block.measured.add(Kind.UPDATE)

    def _take_exponents(self, kind: str, block: _Block, tensors: list[torch.Tensor] | list[torch.Tensor | None]) -> None:
        for site_id, tensor in zip(block.site_ids, tensors):
            if tensor is not None:
                self._exponents.take(kind, site_id, tensor)

    def _look_at_unowned(self, parameters: list[torch.Tensor]) -> None:
        """Trainable parameters that no optimizer holds: their gradients, and whether anything moved them since the last look."""
        block = self._block(UNOWNED, parameters)
        if block.kept_once:
            self._take_updates(block, parameters)
        self._take_parameters(block, parameters)
        self._take_gradients(block, parameters)
        block.kept_once = self._measured.weights

    def _block(self, key: int, parameters: list[torch.Tensor]) -> _Block:
        block = self._blocks.get(key)
        if block is None or not block.is_of(parameters):
            sites = [site for p in parameters if (site := self._tools.models.parameter_site(p)) is not None]
            if len(sites) < len(parameters):
                sites = []  # more sites than a run should hold: these parameters go unmeasured
            num_bytes = sum(p.numel() * p.element_size() for p in parameters if p.is_floating_point())
            kept = ParameterSnapshot(self._bytes_left)
            self._bytes_left = max(0, self._bytes_left - num_bytes)
            block = self._blocks[key] = _Block(parameters if sites else [], sites, kept)
            self._plans.clear()
        return block
