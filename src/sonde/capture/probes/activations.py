"""Statistics of every leaf module's output, and of the gradient of the loss with respect to it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from sonde.capture.exponent_histograms import Exponents
from sonde.capture.leaves import GradientHook, Leaf, LeafHook, await_gradient
from sonde.capture.probes.base import Probe, Tools
from sonde.capture.standins import put_in, take_out
from sonde.capture.watched_model import Watched
from sonde.events import STATISTICS, Kind, Site
from sonde.runlog.format import FramePlan
from sonde.statistics import native, torch_ops
from sonde.statistics.table import StatisticsTable


class _Table:
    """StatisticsTable of statistics, and which of them were written in the step under way."""

    def __init__(self, num_rows: int) -> None:
        self.rows = StatisticsTable(num_rows)
        self.taken = bytearray(num_rows)

    def take(self, row: int, tensor: torch.Tensor) -> None:
        self.rows.measure_one(row, tensor)
        self.taken[row] = 1

    def grow(self) -> None:
        self.rows.synchronize()
        num = len(self.taken)
        larger = StatisticsTable(2 * num)
        larger.values[:num] = self.rows.values
        self.rows, self.taken = larger, self.taken + bytearray(num)


class Activations(Probe):
    name = "activations"

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self.faults = tools.faults
        self.wanted = tools.measured.activations
        self.sites: list[Site] = []
        self._outputs, self._gradients = _Table(64), _Table(64)
        self._with_exponents = False
        self._exponents = Exponents()
        self.desk = tools.desk
        self._hand_over()
        self._leaves: dict[int, Leaf] = {}  # by id(module): kept between plans so that sites stay the same
        self._plans: dict[int, tuple[int, list[tuple[weakref.ref[nn.Module], Leaf]]]] = {}  # by watched model, with its version
        self._armed: list[tuple[dict[str, Any], Leaf]] = []
        self._hooked: list[dict[Any, Any]] = []
        self._key = f"sonde-{id(self)}"  # of our hook among a module's, which torch numbers
        self._door: Leaf | None = None  # the model that was entered, where it is a leaf itself
        self._frames: dict[str, tuple[bytes, FramePlan, npt.NDArray[np.intp] | slice]] = {}

    def begin(self, step: int, *, with_exponents: bool) -> None:
        self._with_exponents = with_exponents
        self.desk.step, self.desk.fast = step, native.ENABLED and not with_exponents

    # -- in and out --------------------------------------------------------------------------------

    def entered(self, watched: Watched, module: nn.Module, args: Any, kwargs: Any) -> None:
        retired = self.faults.retired
        plan = self._plan(watched)
        for ref, leaf in plan if retired else put_in(plan, module, self._armed):
            part = ref()
            if part is None or (retired and (self.name, leaf.path) in retired):
                continue
            if part is module:
                self._door = leaf  # its own forward is under way already: it is measured when it leaves
            elif part._forward_hooks:
                hooks: dict[Any, Any] = part._forward_hooks
                hooks[self._key] = LeafHook(leaf)
                self._hooked.append(hooks)
            else:
                leaf.put_in(part.__dict__)
                self._armed.append((part.__dict__, leaf))

    def left(self, watched: Watched, output: Any) -> None:
        door, self._door = self._door, None
        try:
            if door is not None and output is not None:
                door.measure(output)
        finally:
            for attributes, leaf in take_out(self._armed):
                leaf.take_out(attributes)
            for hooks in self._hooked:
                hooks.pop(self._key, None)
            self._armed.clear()
            self._hooked.clear()

    def _plan(self, watched: Watched) -> list[tuple[weakref.ref[nn.Module], Leaf]]:
        """The leaves, found once and again when modules may have changed."""
        known = self._plans.get(id(watched))
        if known is not None and known[0] == watched.version:
            return known[1]
        plan: list[tuple[weakref.ref[nn.Module], Leaf]] = []
        for path, module in watched.leaves():
            leaf = self._leaves.get(id(module))
            if leaf is None or leaf.module() is not module or (leaf.model, leaf.path) != (watched.name, path):
                leaf = self._leaves[id(module)] = Leaf(self, watched.name, path, module)
            if plan:
                plan[-1][1].feeds_relu = leaf.rectifies
            plan.append((leaf.module, leaf))
        self._plans[id(watched)] = (watched.version, plan)
        return plan

    # -- measuring ---------------------------------------------------------------------------------

    def take(self, leaf: Leaf, call: int, item: int, tensor: torch.Tensor) -> None:
        key = (call, item)
        on_gradient = leaf.rows.get(key)
        if on_gradient is None:
            if key in leaf.rows:
                return
            on_gradient = leaf.rows[key] = self._new_row(leaf, call, item, tensor)
            leaf.first = leaf.rows.get((0, 0))
            if on_gradient is None:
                return
        row = on_gradient.row
        self._outputs.take(row, tensor)
        if tensor.requires_grad:
            on_gradient.step = self.desk.step
            await_gradient(tensor, on_gradient)
        if self._with_exponents:
            self._exponents.take(Kind.ACTIVATION, self.sites[row].id, tensor)

    def take_gradient(self, row: int, gradient: torch.Tensor) -> None:
        self._gradients.take(row, gradient)
        if self._with_exponents:
            self._exponents.take(Kind.ACTIVATION_GRADIENT, self.sites[row].id, gradient)

    def _new_row(self, leaf: Leaf, call: int, item: int, tensor: torch.Tensor) -> GradientHook | None:
        reason = torch_ops.unsupported_reason(tensor)
        if reason is not None:
            self._journal.event("unobserved", self.desk.step, where=leaf.path, reason=reason)
            return None
        site = self._journal.site(
            kind="output", path=leaf.path, model=leaf.model, type=type(leaf.module()).__name__, call=call, item=item,
            shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."),
        )  # fmt: skip
        if site is None:
            return None
        row = len(self.sites)
        self.sites.append(site)
        if row >= len(self._outputs.taken):
            self._outputs.grow()
            self._gradients.grow()
            self._hand_over()
        return GradientHook(self, row)

    # -- the step is over --------------------------------------------------------------------------

    def tables(self) -> Iterable[StatisticsTable]:
        return self._outputs.rows, self._gradients.rows

    def write(self, step: int) -> None:
        self._write(Kind.ACTIVATION, step, self._outputs)
        self._write(Kind.ACTIVATION_GRADIENT, step, self._gradients)
        if self._with_exponents:
            self._exponents.write(self._journal, step)

    def clear(self) -> None:
        self.desk.step = -1
        for table in (self._outputs, self._gradients):
            table.taken[:] = bytes(len(table.taken))
        if self._with_exponents:
            self._exponents.clear()

    def _hand_over(self) -> None:
        outputs, gradients = self._outputs, self._gradients
        self.desk.write_to(outputs.rows.values, outputs.taken, gradients.rows.values, gradients.taken)

    def _write(self, kind: str, step: int, table: _Table) -> None:
        taken = bytes(table.taken)
        if 1 not in taken:
            return
        known = self._frames.get(kind)
        if known is None or known[0] != taken:
            distinct = [row for row, is_taken in enumerate(taken) if is_taken]
            plan = self._journal.plan(kind, STATISTICS, [self.sites[row].id for row in distinct])
            # All rows so far, in order, is the usual case, and a slice is no copy.
            index = slice(len(distinct)) if distinct == list(range(len(distinct))) else np.array(distinct)
            known = self._frames[kind] = (taken, plan, index)
        _, plan, index = known
        self._journal.frame(plan, step, table.rows.values[index])
