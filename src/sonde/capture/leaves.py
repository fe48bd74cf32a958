"""The leaves of a model while a forward of an observed step is under way: each output is measured when its module returns it (a later
in-place operation would change it), and a hook on the tensor waits for its gradient.

`register_full_backward_hook` is not used: it fails on in-place successors and never fires on outputs that are no tensors.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sonde.capture import standins
from sonde.capture.instead import StandIn
from sonde.capture.watched_model import InertCopy
from sonde.statistics.tensor_utils import find_tensors

if TYPE_CHECKING:
    from sonde.capture.probes.activations import Activations

MAX_CALLS = 8  # of one module in one forward: a cell unrolled over a thousand time steps is measured on its first few
_KEY = -1  # of our hook among a tensor's: torch numbers those of others from 0 up


class GradientHook(standins.Hook):
    """Knows its probe, for whatever is not one plain tensor in the memory of the CPU."""

    __slots__ = ("probe",)

    def __init__(self, probe: Activations, row: int) -> None:
        super().__init__(probe.desk, row)
        self.probe = probe

    def slowly(self, gradient: torch.Tensor) -> None:
        self.probe.take_gradient(self.row, gradient)

    def failed(self, error: Exception) -> None:
        self.probe.faults.caught(self.probe.name, self.probe.sites[self.row].path, error)


class Leaf(StandIn, standins.Leaf):
    """A leaf of a model: its place, and the rows of its outputs."""

    __slots__ = ("model", "path", "probe", "rows")

    def __init__(self, probe: Activations, model: str, path: str, module: nn.Module) -> None:
        super().__init__(probe.desk, weakref.ref(module), type(module).forward)
        self.probe, self.model, self.path = probe, model, path
        self.rectifies = type(module) is nn.ReLU
        self.rows: dict[tuple[int, int], GradientHook | None] = {}  # (call, item) -> its row; None: cannot be measured

    def slowly(self, output: Any) -> None:
        call = self.calls
        self.calls = call + 1
        if torch.compiler.is_compiling() or call >= MAX_CALLS:
            return
        outputs = [("0", output)] if type(output) is torch.Tensor else find_tensors(output)
        for item, (_, tensor) in enumerate(outputs):
            self.probe.take(self, call, item, tensor)

    def failed(self, error: Exception) -> None:
        self.probe.faults.caught(self.probe.name, self.path, error)

    def measure(self, output: Any) -> None:
        """An output that did not come through the stand-in."""
        if self.step != self.probe.desk.step:
            self.step, self.calls = self.probe.desk.step, 0
        self.slowly(output)


class LeafHook(InertCopy):
    """Where the user has hooks on a leaf, what flows is what they return: then it is measured by a hook after theirs."""

    __slots__ = ("leaf",)

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        desk = self.leaf.probe.desk
        started = perf_counter_ns()
        try:
            self.leaf.measure(output)
        except Exception as error:
            self.leaf.failed(error)
        desk.own_ns += perf_counter_ns() - started


def await_gradient(tensor: torch.Tensor, hook: GradientHook) -> None:
    """`tensor.register_hook` without the handle, which nobody would use: 1.0 µs instead of 3.8, on every output of an observed step."""
    if type(tensor) is torch.Tensor and tensor._backward_hooks is None and tensor.grad_fn is not None:
        hooks = tensor._backward_hooks = OrderedDict()
        hooks[_KEY] = hook
        tensor.grad_fn._register_hook_dict(tensor)
    else:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
