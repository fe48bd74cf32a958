"""Statistics of every leaf module's output, and of the gradient of the loss with respect to it.

The forward hook measures the value as it is at that moment (a later in-place operation would change it) and leaves a hook on the tensor
for its gradient. `register_full_backward_hook` is not used: it fails on in-place successors and never fires on outputs that are no tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from sonde.capture import kernel
from sonde.capture.calibration import hook_ns
from sonde.capture.exponents import Exponents
from sonde.capture.probes.probe import Probe, Tools
from sonde.capture.tensors import tensors_in
from sonde.capture.watched import InertCopy, Watched
from sonde.record import STATISTICS, Kind, Site
from sonde.run.format import FramePlan

MAX_CALLS = 8  # of one module in one forward: a cell unrolled over a thousand time steps is measured on its first few
_KEY = -1  # of our hook among a tensor's: torch numbers those of others from 0 up


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
                probe.exponents.take(Kind.ACTIVATION_GRADIENT, probe.sites[self.row].id, gradient)
        except Exception as error:
            probe.faults.caught(probe.name, probe.sites[self.row].path, error)
        probe.own_ns += perf_counter_ns() - started + probe.hook_ns


class _LeafHook(InertCopy):
    """Sits on a leaf while a forward of an observed step is under way."""

    __slots__ = ("calls", "model", "path", "probe", "rows", "step")

    def __init__(self, probe: Activations, model: str, path: str) -> None:
        self.probe, self.model, self.path = probe, model, path
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
            probe.faults.caught(probe.name, self.path, error)
        probe.own_ns += perf_counter_ns() - started + probe.hook_ns


class Activations(Probe):
    name = "activations"

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self.faults = tools.faults
        self.sites: list[Site] = []
        self.values, self.gradients = kernel.Rows(64), kernel.Rows(64)
        self.taken: list[int] = []
        self.gradients_taken: list[int] = []
        self.with_exponents = False
        self.exponents = Exponents()
        self.step = -1  # the observed step under way
        self.hook_ns = int(hook_ns())  # what torch takes to call a hook
        self._hooks: dict[int, _LeafHook] = {}  # by id(module): kept between plans so that sites stay the same
        self._plans: dict[int, tuple[int, list[tuple[Any, int, _LeafHook]]]] = {}  # by watched model: its version, its leaves
        self._armed: list[tuple[Any, int]] = []
        self._frames: dict[str, tuple[list[int], FramePlan, npt.NDArray[np.intp]]] = {}

    def begin(self, step: int, *, with_exponents: bool) -> None:
        self.step, self.with_exponents = step, with_exponents

    # -- hooks on and off --------------------------------------------------------------------------

    def entered(self, watched: Watched, args: Any, kwargs: Any) -> None:
        if not self._tools.config.log_activations:
            return
        retired = self.faults.retired
        for hooks, key, hook in self._plan(watched):
            if not retired or (self.name, hook.path) not in retired:
                hooks[key] = hook
                self._armed.append((hooks, key))

    def left(self, watched: Watched) -> None:
        for hooks, key in self._armed:
            hooks.pop(key, None)
        self._armed.clear()

    def _plan(self, watched: Watched) -> list[tuple[Any, int, _LeafHook]]:
        """The leaves, found once and again when modules may have changed. A plan holds hook dictionaries, not modules, which may die."""
        known = self._plans.get(id(watched))
        if known is not None and known[0] == watched.version:
            return known[1]
        plan = []
        for path, module in watched.leaves():
            hook = self._hooks.get(id(module))
            if hook is None or (hook.model, hook.path) != (watched.name, path):
                hook = self._hooks[id(module)] = _LeafHook(self, watched.name, path)
            # A handle is only made for its id, which is unique among all hooks; the hook goes in and out by the dictionary.
            handle = module.register_forward_hook(hook)
            handle.remove()
            plan.append((module._forward_hooks, handle.id, hook))
        self._plans[id(watched)] = (watched.version, plan)
        return plan

    # -- measuring ---------------------------------------------------------------------------------

    def take(self, hook: _LeafHook, module: nn.Module, call: int, item: int, tensor: torch.Tensor) -> None:
        key = (call, item)
        on_gradient = hook.rows.get(key)
        if on_gradient is None:
            if key in hook.rows:
                return
            on_gradient = hook.rows[key] = self._new_row(hook, module, call, item, tensor)
            if on_gradient is None:
                return
        row = on_gradient.row
        self.values.measure_one(row, tensor)
        self.taken.append(row)
        if tensor.requires_grad:
            on_gradient.step = self.step
            _await_gradient(tensor, on_gradient)
        if self.with_exponents:
            self.exponents.take(Kind.ACTIVATION, self.sites[row].id, tensor)

    def _new_row(self, hook: _LeafHook, module: nn.Module, call: int, item: int, tensor: torch.Tensor) -> _GradientHook | None:
        reason = kernel.supported(tensor)
        if reason is not None:
            self._journal.event("unobserved", self.step, where=hook.path, reason=reason)
            return None
        site = self._journal.site(
            kind="output", path=hook.path, model=hook.model, type=type(module).__name__, call=call, item=item,
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
        self.exponents.write(self._journal, step)

    def clear(self) -> None:
        self.step, self.own_ns = -1, 0
        self.taken, self.gradients_taken = [], []
        self.exponents.clear()

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


def _await_gradient(tensor: torch.Tensor, hook: _GradientHook) -> None:
    """`tensor.register_hook` without the handle, which nobody would use: 1.0 µs instead of 3.8, on every output of an observed step."""
    if type(tensor) is torch.Tensor and tensor._backward_hooks is None and tensor.grad_fn is not None:
        hooks = tensor._backward_hooks = OrderedDict()
        hooks[_KEY] = hook
        tensor.grad_fn._register_hook_dict(tensor)
    else:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def _grown(rows: kernel.Rows) -> kernel.Rows:
    rows.settle()
    larger = kernel.Rows(2 * len(rows.values))
    larger.values[: len(rows.values)] = rows.values
    return larger
