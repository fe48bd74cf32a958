"""Statistics of every parameter, its gradient and its update, taken around the optimizer's step in a few batched calls.

Gradients are read when the optimizer is about to use them: that is after accumulation, unscaling and clipping, and it holds in compiled
models too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import torch

from sonde.capture import kernel
from sonde.capture.journal import Journal
from sonde.capture.probes.activations import write_exponents
from sonde.config import DebugConfig
from sonde.record import STATISTICS, Kind, Site
from sonde.run.format import FramePlan

UNOWNED = -1  # key of the block of parameters that no optimizer holds
SiteOf = Callable[[torch.Tensor], Site | None]


class _Block:
    """The parameters of one optimizer (or those that none owns): sites and rows, planned once."""

    def __init__(self, parameters: list[torch.Tensor], sites: list[Site], kept: kernel.Kept) -> None:
        self.refs = [weakref.ref(p) for p in parameters]
        self.site_ids = [site.id for site in sites]
        self.rows = {kind: kernel.Rows(len(parameters)) for kind in (Kind.PARAMETER, Kind.GRADIENT, Kind.UPDATE)}
        self.kept = kept
        self.kept_once = False
        self.measured: set[str] = set()

    def is_of(self, parameters: list[torch.Tensor]) -> bool:
        return len(parameters) == len(self.refs) and all(ref() is p for ref, p in zip(self.refs, parameters))


class Weights:
    def __init__(self, journal: Journal, config: DebugConfig, site_of: SiteOf) -> None:
        self._journal, self._config, self._site_of = journal, config, site_of
        self._blocks: dict[int, _Block] = {}
        self._plans: dict[tuple[str, tuple[int, ...]], FramePlan] = {}
        self._exponents: dict[str, list[tuple[int, int, int]]] = {}
        self._bytes_left = int(config.max_update_memory_mb * 2**20)

    def before(self, key: int, parameters: list[torch.Tensor], *, with_gradients: bool) -> None:
        """The optimizer is about to step."""
        block = self._block(key, parameters)
        if self._config.log_weights and block.site_ids:
            if block.kept.available:
                block.kept.keep(parameters, block.rows[Kind.PARAMETER], 0)
            else:
                block.rows[Kind.PARAMETER].measure(0, parameters)
            block.measured.add(Kind.PARAMETER)
        if with_gradients:
            self.gradients(key, parameters)

    def gradients(self, key: int, parameters: list[torch.Tensor]) -> None:
        block = self._block(key, parameters)
        if self._config.log_gradients and block.site_ids:
            block.rows[Kind.GRADIENT].measure(0, [p.grad for p in parameters])
            block.measured.add(Kind.GRADIENT)

    def after(self, key: int, parameters: list[torch.Tensor]) -> None:
        """The optimizer has stepped."""
        block = self._blocks.get(key)
        if block is not None and Kind.PARAMETER in block.measured and block.kept.available and block.is_of(parameters):
            block.kept.change(parameters, block.rows[Kind.UPDATE], 0)
            block.measured.add(Kind.UPDATE)

    def unowned(self, parameters: list[torch.Tensor]) -> None:
        """Trainable parameters that no optimizer holds: their gradients, and whether anything moved them since they were last looked at."""
        block = self._block(UNOWNED, parameters)
        if block.kept_once:
            block.measured.add(Kind.PARAMETER)
            self.after(UNOWNED, parameters)
        self.before(UNOWNED, parameters, with_gradients=True)
        block.kept_once = Kind.PARAMETER in block.measured and block.kept.available

    def exponents(self, key: int, parameters: list[torch.Tensor]) -> None:
        """Power-of-two histograms of parameters and gradients."""
        block = self._block(key, parameters)
        for site_id, p in zip(block.site_ids, parameters):
            for kind, tensor in ((Kind.PARAMETER, p), (Kind.GRADIENT, p.grad)):
                histogram = kernel.exponents(tensor) if tensor is not None and tensor.is_cpu else None
                if histogram is not None:
                    rows = self._exponents.setdefault(kind, [])
                    rows.extend((site_id, exponent, count) for exponent, count in zip(*histogram))

    def write(self, step: int) -> None:
        for kind in (Kind.PARAMETER, Kind.GRADIENT, Kind.UPDATE):
            keys = tuple(key for key, block in self._blocks.items() if kind in block.measured)
            if not keys:
                continue
            blocks = [self._blocks[key] for key in keys]
            for block in blocks:
                block.rows[kind].settle()
            plan = self._plans.get((kind, keys))
            if plan is None:
                ids = [site_id for block in blocks for site_id in block.site_ids]
                plan = self._plans[kind, keys] = self._journal.plan(kind, STATISTICS, ids)
            tables = [block.rows[kind].values for block in blocks]
            self._journal.frame(plan, step, tables[0] if len(tables) == 1 else np.concatenate(tables))
        for kind, rows in self._exponents.items():
            write_exponents(self._journal, kind, step, rows)

    def clear(self) -> None:
        for block in self._blocks.values():
            block.measured.clear()
        self._exponents = {}

    def _block(self, key: int, parameters: list[torch.Tensor]) -> _Block:
        block = self._blocks.get(key)
        if block is None or not block.is_of(parameters):
            sites = [site for p in parameters if (site := self._site_of(p)) is not None]
            if len(sites) < len(parameters):
                sites = []  # more sites than a run should hold: these parameters go unmeasured
            num_bytes = sum(p.numel() * p.element_size() for p in parameters if p.is_floating_point())
            kept = kernel.Kept(self._bytes_left)
            self._bytes_left = max(0, self._bytes_left - num_bytes)
            block = self._blocks[key] = _Block(parameters if sites else [], sites, kept)
            self._plans.clear()
        return block
