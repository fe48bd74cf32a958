"""Statistics of every leaf module's output, and of the gradient of the loss with respect to it.

An output is measured as it is when its module returns it (a later in-place operation would change it), and a hook on the tensor waits
for its gradient. `register_full_backward_hook` is not used: it fails on in-place successors and never fires on outputs that are no tensors.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from functools import partial
from operator import itemgetter
from time import perf_counter_ns
from types import MethodType
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


class _Leaf:
    """Stands in for a leaf's `forward` while a forward of an observed step is under way: it calls the real one, then measures.

    A forward hook would do the same, but a module with hooks takes a way through torch that costs more than all of the measuring.
    """

    __slots__ = ("calls", "first", "forward", "model", "module", "path", "probe", "rows", "step", "under")

    def __init__(self, probe: Activations, model: str, path: str, module: nn.Module) -> None:
        self.probe, self.model, self.path = probe, model, path
        self.module = weakref.ref(module)
        self.forward = type(module).forward
        self.under: Any = None  # what the instance had in this place: a forward of its own, or the stand-in of another session
        self.calls, self.step = 0, -1
        self.rows: dict[tuple[int, int], _GradientHook | None] = {}  # (call, item) -> its row; None: cannot be measured
        self.first: _GradientHook | None = None  # the row of the first call and item

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.under(*args, **kwargs) if self.under is not None else self.forward(self.module(), *args, **kwargs)
        probe = self.probe
        started = perf_counter_ns()
        try:
            self.measure(output)
        except Exception as error:
            probe.faults.caught(probe.name, self.path, error)
        probe.own_ns += perf_counter_ns() - started
        return output

    def measure(self, output: Any) -> None:
        probe = self.probe
        if self.step != probe.step:
            self.step, self.calls = probe.step, 0
        call = self.calls
        self.calls = call + 1
        if torch.compiler.is_compiling() or call >= MAX_CALLS:
            pass
        elif type(output) is torch.Tensor:
            first = self.first if call == 0 else None
            if first is not None and not probe.with_exponents:
                # What nearly all outputs are: one tensor, seen before.
                probe.values.measure_one(first.row, output)
                probe.taken.append(first.row)
                if output.requires_grad:
                    first.step = self.step
                    _await_gradient(output, first)
            else:
                probe.take(self, call, 0, output)
        else:
            for item, (_, tensor) in enumerate(tensors_in(output)):
                probe.take(self, call, item, tensor)

    def put_in(self, attributes: dict[str, Any]) -> None:
        top = attributes.get("forward")
        while isinstance(top, _Leaf):
            if top is self:
                return  # it was not taken out, for whatever reason
            top = top.under
        self.under = attributes.get("forward")
        attributes["forward"] = self

    def take_out(self, attributes: dict[str, Any]) -> None:
        """Two sessions may watch one model, and leave in any order: whoever stands on top of this one takes its place."""
        top = attributes.get("forward")
        if top is not self:
            while isinstance(top, _Leaf) and top.under is not self:
                top = top.under
            if isinstance(top, _Leaf):
                top.under = self.under
        elif self.under is None:
            del attributes["forward"]
        else:
            attributes["forward"] = self.under
        self.under = None

    # A module that is copied or pickled in the middle of a forward takes the real forward with it, bound to the copy.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = memo.get(id(self.module()), self.module())
        return copy.deepcopy(self.under, memo) if self.under is not None else MethodType(self.forward, module)

    def __reduce__(self) -> Any:
        return (itemgetter(0), ((self.under,),)) if self.under is not None else (partial, (self.forward, self.module()))


class _LeafHook(InertCopy):
    """Where the user has hooks on a leaf, what flows is what they return: then it is measured by a hook after theirs."""

    __slots__ = ("leaf",)

    def __init__(self, leaf: _Leaf) -> None:
        self.leaf = leaf

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        probe = self.leaf.probe
        started = perf_counter_ns()
        try:
            self.leaf.measure(output)
        except Exception as error:
            probe.faults.caught(probe.name, self.leaf.path, error)
        probe.own_ns += perf_counter_ns() - started


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
        self._leaves: dict[int, _Leaf] = {}  # by id(module): kept between plans so that sites stay the same
        self._plans: dict[int, tuple[int, list[tuple[weakref.ref[nn.Module], _Leaf]]]] = {}  # by watched model, with its version
        self._armed: list[tuple[dict[str, Any], _Leaf]] = []
        self._hooked: list[dict[Any, Any]] = []
        self._key = f"sonde-{id(self)}"  # of our hook among a module's, which torch numbers
        self._door: _Leaf | None = None  # the model that was entered, where it is a leaf itself
        self._frames: dict[str, tuple[list[int], FramePlan, npt.NDArray[np.intp] | slice]] = {}

    def begin(self, step: int, *, with_exponents: bool) -> None:
        self.step, self.with_exponents = step, with_exponents

    # -- in and out --------------------------------------------------------------------------------

    def entered(self, watched: Watched, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._tools.config.log_activations:
            return
        retired = self.faults.retired
        for ref, leaf in self._plan(watched):
            part = ref()
            if part is None or (retired and (self.name, leaf.path) in retired):
                continue
            if part is module:
                self._door = leaf  # its own forward is under way already: it is measured when it leaves
            elif part._forward_hooks:
                hooks: dict[Any, Any] = part._forward_hooks
                hooks[self._key] = _LeafHook(leaf)
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
            for attributes, leaf in self._armed:
                leaf.take_out(attributes)
            for hooks in self._hooked:
                hooks.pop(self._key, None)
            self._armed.clear()
            self._hooked.clear()

    def _plan(self, watched: Watched) -> list[tuple[weakref.ref[nn.Module], _Leaf]]:
        """The leaves, found once and again when modules may have changed."""
        known = self._plans.get(id(watched))
        if known is not None and known[0] == watched.version:
            return known[1]
        plan = []
        for path, module in watched.leaves():
            leaf = self._leaves.get(id(module))
            if leaf is None or leaf.module() is not module or (leaf.model, leaf.path) != (watched.name, path):
                leaf = self._leaves[id(module)] = _Leaf(self, watched.name, path, module)
            plan.append((leaf.module, leaf))
        self._plans[id(watched)] = (watched.version, plan)
        return plan

    # -- measuring ---------------------------------------------------------------------------------

    def take(self, leaf: _Leaf, call: int, item: int, tensor: torch.Tensor) -> None:
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
        self.values.measure_one(row, tensor)
        self.taken.append(row)
        if tensor.requires_grad:
            on_gradient.step = self.step
            _await_gradient(tensor, on_gradient)
        if self.with_exponents:
            self.exponents.take(Kind.ACTIVATION, self.sites[row].id, tensor)

    def _new_row(self, leaf: _Leaf, call: int, item: int, tensor: torch.Tensor) -> _GradientHook | None:
        reason = kernel.supported(tensor)
        if reason is not None:
            self._journal.event("unobserved", self.step, where=leaf.path, reason=reason)
            return None
        site = self._journal.site(
            kind="output", path=leaf.path, model=leaf.model, type=type(leaf.module()).__name__, call=call, item=item,
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
            # All rows so far, in order, is the usual case, and a slice is no copy.
            index = slice(len(distinct)) if distinct == list(range(len(distinct))) else np.array(distinct)
            known = self._frames[kind] = (taken, plan, index)
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
