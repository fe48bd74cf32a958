"""Statistics of every leaf module's output, and of the gradient of the loss with respect to it.

The forward hook measures the value as it is at that moment (a later in-place operation would change it) and leaves a hook on the tensor
for its gradient. `register_full_backward_hook` is not used: it fails on in-place successors and never fires on outputs that are no tensors.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from sonde.capture import kernel
from sonde.capture.faults import Faults
from sonde.capture.journal import Journal
from sonde.capture.tensors import tensors_in
from sonde.capture.watched import InertCopy, Watched
from sonde.record import EXPONENT_FIELDS, STATISTICS, Kind, Site
from sonde.run.format import FramePlan

MAX_CALLS = 8  # of one module in one forward: a cell unrolled over a thousand time steps is measured on its first few
_PROBE = "activations"


class _GradientHook:
    """Waits on an output for its gradient. It outlives the step on a kept graph, and is then deaf."""

    __slots__ = ("probe", "row", "step")

    def __init__(self, probe: Activations, row: int) -> None:
        self.probe, self.row, self.step = probe, row, -1

    def __call__(self, gradient: torch.Tensor) -> None:
        probe = self.probe
        if probe.step != self.step:
            return
        started = perf_counter_ns()
        try:
            probe.gradients.measure_one(self.row, gradient)
            probe.gradients_taken.append(self.row)
            if probe.with_exponents:
                probe.take_exponents(Kind.ACTIVATION_GRADIENT, self.row, gradient)
        except Exception as error:
            probe.faults.caught(_PROBE, probe.sites[self.row].path, error)
        probe.own_ns += perf_counter_ns() - started


class _LeafHook(InertCopy):
    """Sits on a leaf while a forward of an observed step is under way."""

    __slots__ = ("calls", "path", "probe", "rows", "step")

    def __init__(self, probe: Activations, path: str) -> None:
        self.probe, self.path = probe, path
        self.calls, self.step = 0, -1
        self.rows: dict[tuple[int, int], _GradientHook | None] = {}  # (call, item) -> its row; None: cannot be measured

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        probe = self.probe
        started = perf_counter_ns()
        try:
            if self.step != probe.step:
                self.step, self.calls = probe.step, 0
            call = self.calls
            self.calls = call + 1
            if call >= MAX_CALLS:
                pass
            elif type(output) is torch.Tensor:
                probe.take(self, module, call, 0, output)
            else:
                for item, (_, tensor) in enumerate(tensors_in(output)):
                    probe.take(self, module, call, item, tensor)
        except Exception as error:
            probe.faults.caught(_PROBE, self.path, error)
        probe.own_ns += perf_counter_ns() - started


class Activations:
    def __init__(self, journal: Journal, faults: Faults, model: str) -> None:
        self._journal, self.faults, self._model = journal, faults, model
        self.sites: list[Site] = []
        self.values, self.gradients = kernel.Rows(64), kernel.Rows(64)
        self.taken: list[int] = []
        self.gradients_taken: list[int] = []
        self.with_exponents = True  # on the first step
        self._exponents: dict[str, list[tuple[int, int, int]]] = {}
        self.step = -1  # the observed step under way
        self.own_ns = 0
        self._hooks: dict[int, _LeafHook] = {}  # by id(module): kept between plans so that sites stay the same
        self._excluded: set[int] = set()  # ids of modules that are compiled
        self._armed: list[tuple[Any, int]] = []
        self._plan: list[tuple[Any, int, _LeafHook]] = []
        self._frames: dict[str, tuple[list[int], FramePlan, npt.NDArray[np.intp]]] = {}

    # -- hooks on and off --------------------------------------------------------------------------

    def plan(self, watched: Watched) -> None:
        """Find the leaves, once; again when modules may have changed. The plan holds hook dictionaries, not modules, which may die."""
        self._plan = []
        for path, module in watched.leaves():
            if id(module) in self._excluded:
                continue
            hook = self._hooks.get(id(module))
            if hook is None or hook.path != path:
                hook = self._hooks[id(module)] = _LeafHook(self, path)
            # A handle is only made for its id, which is unique among all hooks; the hook goes in and out by the dictionary.
            handle = module.register_forward_hook(hook)
            handle.remove()
            self._plan.append((module._forward_hooks, handle.id, hook))

    def exclude(self, module: nn.Module) -> None:
        """A part that is being compiled: changing its hooks would compile it again, so it never gets one."""
        inside = {id(other) for other in module.modules()}
        self._excluded |= inside
        dictionaries = {id(other._forward_hooks) for other in module.modules()}
        self._plan = [entry for entry in self._plan if id(entry[0]) not in dictionaries]

    def arm(self, step: int) -> None:
        self.step = step
        retired = self.faults.retired
        for hooks, key, hook in self._plan:
            if retired and (_PROBE, hook.path) in retired:
                continue
            hooks[key] = hook
            self._armed.append((hooks, key))

    def disarm(self) -> None:
        for hooks, key in self._armed:
            hooks.pop(key, None)
        self._armed.clear()

    @property
    def num_hook_calls(self) -> int:
        return len(self.taken) + len(self.gradients_taken)

    # -- measuring ---------------------------------------------------------------------------------

    def take(self, hook: _LeafHook, module: nn.Module, call: int, item: int, tensor: torch.Tensor) -> None:
        key = (call, item)
        on_gradient = hook.rows.get(key)
        if on_gradient is None:
            if key in hook.rows:
                return
            on_gradient = hook.rows[key] = self._new_row(hook.path, module, call, item, tensor)
            if on_gradient is None:
                return
        row = on_gradient.row
        self.values.measure_one(row, tensor)
        self.taken.append(row)
        if tensor.requires_grad:
            on_gradient.step = self.step
            tensor.register_hook(on_gradient)  # type: ignore[no-untyped-call]
        if self.with_exponents:
            self.take_exponents(Kind.ACTIVATION, row, tensor)

    def take_exponents(self, kind: str, row: int, tensor: torch.Tensor) -> None:
        histogram = kernel.exponents(tensor) if tensor.is_cpu else None
        if histogram is not None:
            site = self.sites[row].id
            self._exponents.setdefault(kind, []).extend((site, exponent, count) for exponent, count in zip(*histogram))

    def _new_row(self, path: str, module: nn.Module, call: int, item: int, tensor: torch.Tensor) -> _GradientHook | None:
        reason = kernel.supported(tensor)
        if reason is not None:
            self._journal.event("unobserved", self.step, where=path, reason=reason)
            return None
        site = self._journal.site(
            kind="output", path=path, model=self._model, type=type(module).__name__, call=call, item=item,
            shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."),
        )  # fmt: skip
        if site is None:
            return None
        row = len(self.sites)
        self.sites.append(site)
        if row >= len(self.values.values):
            self.values, self.gradients = _grown(self.values), _grown(self.gradients)
        return _GradientHook(self, row)

    # -- the step is over --------------------------------------------------------------------------

    def write(self, step: int) -> None:
        self.values.settle()
        self.gradients.settle()
        self._write(Kind.ACTIVATION, step, self.taken, self.values)
        self._write(Kind.ACTIVATION_GRADIENT, step, self.gradients_taken, self.gradients)
        for kind, rows in self._exponents.items():
            write_exponents(self._journal, kind, step, rows)

    def clear(self) -> None:
        """Forget the step, whatever became of it."""
        self.disarm()
        self.step, self.own_ns = -1, 0
        self.taken, self.gradients_taken = [], []
        self._exponents = {}

    def _write(self, kind: str, step: int, taken: list[int], rows: kernel.Rows) -> None:
        if not taken:
            return
        known = self._frames.get(kind)
        if known is None or known[0] != taken:
            distinct = sorted(set(taken))
            plan = self._journal.plan(kind, STATISTICS, [self.sites[row].id for row in distinct])
            known = self._frames[kind] = (taken, plan, np.array(distinct))
        _, plan, index = known
        self._journal.frame(plan, step, rows.values[index])


def write_exponents(journal: Journal, kind: str, step: int, rows: list[tuple[int, int, int]]) -> None:
    if rows:
        table = np.array(rows, np.float64)
        plan = journal.plan(kind + Kind.EXPONENTS, EXPONENT_FIELDS, table[:, 0].astype(int).tolist())
        journal.frame(plan, step, table[:, 1:])


def _grown(rows: kernel.Rows) -> kernel.Rows:
    rows.settle()
    larger = kernel.Rows(2 * len(rows.values))
    larger.values[: len(rows.values)] = rows.values
    return larger


