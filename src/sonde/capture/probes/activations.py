"""Statistics of every leaf module's output, and of the gradient of the loss with respect to it.

During an observed forward one global forward hook measures each output, before a later in-place operation can change it, and a hook on the
tensor measures its gradient. `register_full_backward_hook` is not used: it fails on in-place successors.
"""

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.compiler import is_compiling

from sonde.capture.choose_observed_steps import hook_ns
from sonde.capture.forward_call_patch import UncopiedHook, hook_all_modules
from sonde.capture.probes.probe import Probe, ProbeContext
from sonde.capture.record_exponent_histograms import ExponentHistograms
from sonde.capture.watched_model import WatchedModel
from sonde.events import STATISTICS, Kind, NotMeasured, Site
from sonde.runlog.record_format import FramePlan
from sonde.statistics.find_tensors import find_tensors
from sonde.statistics.private_torch_api import add_gradient_hook
from sonde.statistics.statistics_without_extension import unsupported_reason
from sonde.statistics.tensor_statistics_table import StatisticsTable

MAX_CALLS = 8  # of one module in one forward: a cell unrolled over a thousand time steps is measured on its first calls


class _Leaf:
    """A leaf module by its path, and the rows of its outputs."""

    __slots__ = ("model", "module", "num_calls", "path", "rows", "step")

    def __init__(self, model: str, path: str, module: nn.Module) -> None:
        self.model, self.path, self.module = model, path, weakref.ref(module)
        self.rows: dict[tuple[int, int], int | None] = {}  # (call, item) -> row; None: cannot be measured
        self.step, self.num_calls = -1, 0


class _LeafHook(UncopiedHook):
    """A forward hook on one module, for the duration of an observed forward."""

    def __init__(self, on_output: Callable[[nn.Module, Any, Any], None]) -> None:
        self._on_output = on_output

    def __call__(self, *args: Any) -> None:
        self._on_output(*args)


class _MeasuredRows:
    """A table of statistics, and which rows were written in this step."""

    def __init__(self, num_rows: int) -> None:
        self.table = StatisticsTable(num_rows)
        self.is_written = bytearray(num_rows)

    def grow(self) -> None:
        self.table.synchronize()
        num = len(self.is_written)
        larger = StatisticsTable(2 * num)
        larger.values[:num] = self.table.values
        self.table, self.is_written = larger, self.is_written + bytearray(num)


class ActivationProbe(Probe):
    """Measures outputs of layers and their gradients."""

    name = "activations"
    OBSERVED_ONLY = True

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._sites: list[Site] = []
        self._outputs, self._gradients = _MeasuredRows(64), _MeasuredRows(64)
        self._histograms = ExponentHistograms()
        self._leaves: dict[int, _Leaf] = {}  # by id(module), stored between plans so that sites stay the same
        self._plans: dict[int, tuple[int, dict[int, _Leaf]]] = {}  # by watched model: its version, its leaves by id(module)
        self._plan: dict[int, _Leaf] = {}  # of the forward that is under way, by id(module)
        self._remove: list[Callable[[], None]] = []  # the hooks of that forward
        self._frames: dict[str, tuple[bytes, FramePlan, npt.NDArray[np.intp] | slice]] = {}
        self._hook_ns = int(hook_ns())
        self._timer, self._disabled = context.timer, context.isolation.disabled

    @property
    def is_enabled(self) -> bool:
        return self._context.measured.activations

    def on_forward_start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        watched = self._state.model
        if watched is None or not self._state.is_first_forward:
            return
        self.on_detach()  # hooks of a forward whose end was not seen
        leaves = self._leaves_of(watched)
        self._plan = {**leaves}
        self._plan.pop(id(module), None)  # where the model itself is a leaf, its output is measured at the end
        has_compiled_parts = watched.has_compiled_parts
        for leaf in leaves.values():
            # The output that flows on is what the user's hooks return: then ours comes after theirs. Where a part of the model is
            # compiled, torch warns about global hooks: there the eager leaves are hooked one by one.
            part = leaf.module()
            if part is not None and (has_compiled_parts or part._forward_hooks) and part is not module:
                del self._plan[id(part)]
                self._remove.append(part.register_forward_hook(_LeafHook(partial(self._on_own_output, leaf))).remove)
        if not has_compiled_parts:
            self._remove.append(hook_all_modules(after=self._on_output))

    def on_forward_end(self, module: nn.Module, output: Any) -> None:
        self._plan = {}
        self.on_detach()
        watched = self._state.model
        leaf = self._leaves_of(watched).get(id(module)) if watched is not None and self._state.is_first_forward else None
        if leaf is not None and output is not None:
            self._measure(leaf, output)

    def _leaves_of(self, watched: WatchedModel) -> dict[int, _Leaf]:
        """The leaves by id(module), found once and again when modules may have changed."""
        known = self._plans.get(id(watched))
        if known is not None and known[0] == watched.version:
            return known[1]
        plan: dict[int, _Leaf] = {}
        for path, module in watched.leaves():
            if not self._context.models.selects(watched.name, path or type(module).__name__):
                continue
            leaf = self._leaves.get(id(module))
            if leaf is None or leaf.module() is not module or (leaf.model, leaf.path) != (watched.name, path):
                leaf = self._leaves[id(module)] = _Leaf(watched.name, path, module)
            plan[id(module)] = leaf
        self._plans[id(watched)] = (watched.version, plan)
        return plan

    def _on_output(self, module: nn.Module, args: Any, output: Any) -> None:
        """The hook on all modules of the process, or on one leaf."""
        leaf = self._plan.get(id(module))
        if leaf is None or leaf.module() is not module or is_compiling():
            return
        started = perf_counter_ns()
        try:
            self._measure(leaf, output)
        except Exception as error:
            self._context.isolation.report(self.name, leaf.path, error)
        self._timer.own_ns += perf_counter_ns() - started + self._hook_ns

    def _on_own_output(self, leaf: _Leaf, module: nn.Module, args: Any, output: Any) -> None:
        """The hook on one leaf, which the hook on all modules passes over."""
        if leaf.module() is module:
            self._plan[id(module)] = leaf
            self._on_output(module, args, output)
            del self._plan[id(module)]

    def _measure(self, leaf: _Leaf, output: Any) -> None:
        state = self._state
        number = state.number
        if leaf.step != number:
            leaf.step, leaf.num_calls = number, 0
        call = leaf.num_calls
        leaf.num_calls = call + 1
        if call >= MAX_CALLS or (self._disabled and (self.name, leaf.path) in self._disabled):
            return
        for item, tensor in ((0, output),) if type(output) is torch.Tensor else enumerate(each for _, each in find_tensors(output)):
            row = leaf.rows.get((call, item), -1)
            if row == -1:
                row = leaf.rows[call, item] = self._new_row(leaf, call, item, tensor)
            if row is None:
                continue
            self._outputs.table.measure_one(row, tensor)
            self._outputs.is_written[row] = 1
            if tensor.requires_grad:
                add_gradient_hook(tensor, partial(self._on_gradient, row, number))
            if state.with_histograms:
                self._histograms.add(Kind.ACTIVATION, self._sites[row].id, tensor)

    def _on_gradient(self, row: int, number: int, gradient: torch.Tensor) -> None:
        """The hook on an output. On a stored graph it outlives the step, and then does nothing."""
        state = self._state
        if state.number != number or not state.is_observed:
            return
        started = perf_counter_ns()
        try:
            self._gradients.table.measure_one(row, gradient)
            self._gradients.is_written[row] = 1
            if state.with_histograms:
                self._histograms.add(Kind.ACTIVATION_GRADIENT, self._sites[row].id, gradient)
        except Exception as error:
            self._context.isolation.report(self.name, self._sites[row].path, error)
        self._timer.own_ns += perf_counter_ns() - started + self._hook_ns

    def _new_row(self, leaf: _Leaf, call: int, item: int, tensor: torch.Tensor) -> int | None:
        reason = unsupported_reason(tensor)
        if reason is not None:
            self._recorder.emit(NotMeasured(where=leaf.path, reason=reason), self._state.number)
            return None
        site = self._recorder.site(
            kind="output", path=leaf.path, model=leaf.model, type=type(leaf.module()).__name__, call=call, item=item,
            shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."),
        )  # fmt: skip
        if site is None:
            return None
        row = len(self._sites)
        self._sites.append(site)
        if row >= len(self._outputs.is_written):
            self._outputs.grow()
            self._gradients.grow()
        return row

    def tables(self) -> Iterable[StatisticsTable]:
        return self._outputs.table, self._gradients.table

    def collect(self) -> None:
        self._write(Kind.ACTIVATION, self._outputs)
        self._write(Kind.ACTIVATION_GRADIENT, self._gradients)
        if self._state.with_histograms:
            self._histograms.write(self._recorder, self._state.number)

    def reset(self) -> None:
        for rows in (self._outputs, self._gradients):
            rows.is_written[:] = bytes(len(rows.is_written))
        self._histograms.clear()

    def on_detach(self) -> None:
        while self._remove:
            self._remove.pop()()

    def _write(self, kind: str, rows: _MeasuredRows) -> None:
        is_written = bytes(rows.is_written)
        if 1 not in is_written:
            return
        known = self._frames.get(kind)
        if known is None or known[0] != is_written:
            written = [row for row, flag in enumerate(is_written) if flag]
            plan = self._recorder.plan(kind, STATISTICS, [self._sites[row].id for row in written])
            # All rows so far, in order, is the usual case, and a slice is no copy.
            index = slice(len(written)) if written == list(range(len(written))) else np.array(written)
            known = self._frames[kind] = (is_written, plan, index)
        _, plan, index = known
        self._recorder.frame(plan, self._state.number, rows.table.values[index])
