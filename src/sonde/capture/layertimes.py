"""How long each leaf of a model took in one step, and how much there was to compute.

Forward: from the call of the module to its return. Backward: from the moment the gradient of its output is there until that of its input
is (where it needs none, that of its first parameter), for those that took longest the last time. Hooks are on during the step that is
looked at, and at no other time.
"""

from __future__ import annotations

import math
import weakref
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sonde.capture.standins import Desk
from sonde.capture.watched import InertCopy, Watched

MAX_LAYERS = 4000  # hooks on more would take longer than the step
MAX_CALLS = 64  # of one layer whose shapes are noted
MAX_TOLD = 40
NUM_SLOWEST = 8  # layers whose backward is timed, the next time


class LayerTime(NamedTuple):
    path: str
    type: str
    dtype: str
    num: int  # calls
    forward_ms: float
    backward_ms: float  # NaN where it is not known
    multiplications: float  # of one forward, for layers with a weight matrix; else 0
    elements: float  # that went in and came out, and weights


class _Layer:
    """What is noted of a leaf while it runs; the sums are done when the step is over."""

    __slots__ = ("backward_ns", "began", "forward_ns", "module", "num", "num_backwards", "path", "seen", "times")

    def __init__(self, times: LayerTimes, path: str, module: nn.Module) -> None:
        self.times, self.path, self.module = times, path, weakref.ref(module)
        self.began: list[tuple[int, int]] = []  # a module may call itself
        self.num = self.num_backwards = 0
        self.forward_ns = self.backward_ns = 0
        self.seen: list[tuple[torch.Size, torch.Size, torch.dtype]] = []  # of each call: what went in, what came out


class _Before(InertCopy):
    def __init__(self, layer: _Layer) -> None:
        self.layer = layer

    def __call__(self, module: nn.Module, args: Any) -> None:
        # Recomputation in backward and forwards without gradients are not the training's forward.
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1 and torch.is_grad_enabled():
            self.layer.began.append((perf_counter_ns(), self.layer.times.desk.own_ns))


class _After(InertCopy):
    def __init__(self, layer: _Layer) -> None:
        self.layer = layer

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self.layer.began:
            return
        now, (began, own_ns) = perf_counter_ns(), self.layer.began.pop()
        layer, desk = self.layer, self.layer.times.desk
        layer.forward_ns += now - began - (desk.own_ns - own_ns)
        layer.num += 1
        given = args[0] if args else None
        if type(output) is Tensor and isinstance(given, Tensor):
            if len(layer.seen) < MAX_CALLS:
                layer.seen.append((given.shape, output.shape, output.dtype))
            if layer.path in layer.times.slowest and given is not output and output.grad_fn is not None:
                layer.times.await_gradients(layer, given, output)
        desk.own_ns += perf_counter_ns() - now + 2 * desk.hook_ns


class LayerTimes:
    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.slowest: frozenset[str] = frozenset()  # of the last time: only of these the backward is timed
        self._layers: list[_Layer] = []
        self._handles: list[Any] = []
        self._on = False

    def put_on(self, watched: Watched) -> None:
        """From now on, the leaves of this model too."""
        began = perf_counter_ns()
        leaves = list(watched.leaves())
        if len(leaves) <= MAX_LAYERS:
            self._on = True
            for path, module in leaves:
                layer = _Layer(self, ".".join(part for part in (watched.name, path) if part), module)
                self._layers.append(layer)
                self._handles.append(module.register_forward_pre_hook(_Before(layer)))
                self._handles.append(module.register_forward_hook(_After(layer)))
        self.desk.own_ns += perf_counter_ns() - began

    def stop(self) -> list[LayerTime]:
        """The layers that took longest, the longest first."""
        while self._handles:
            self._handles.pop().remove()
        self._on = False
        ran = sorted((layer for layer in self._layers if layer.num), key=lambda layer: -layer.forward_ns)[:MAX_TOLD]
        self._layers.clear()
        self.slowest = frozenset(layer.path for layer in ran[:NUM_SLOWEST])
        return [_told(layer) for layer in ran]

    def await_gradients(self, layer: _Layer, given: Tensor, output: Tensor) -> None:
        desk, came = self.desk, [0, 0]

        def output_came(gradient: Tensor) -> None:
            if self._on:
                came[:] = perf_counter_ns(), desk.own_ns

        def input_came(gradient: Tensor) -> None:
            if self._on and came[0]:
                layer.backward_ns += max(0, perf_counter_ns() - came[0] - (desk.own_ns - came[1]))
                layer.num_backwards += 1
                came[0] = 0

        if given.requires_grad:
            given.register_hook(input_came)  # type: ignore[no-untyped-call]
        else:
            module = layer.module()
            weight = None if module is None else next((p for p in module._parameters.values() if p is not None and p.requires_grad), None)
            if weight is None:
                return
            self._handles.append(weight.register_post_accumulate_grad_hook(input_came))  # type: ignore[no-untyped-call]
        output.register_hook(output_came)  # type: ignore[no-untyped-call]


def _told(layer: _Layer) -> LayerTime:
    module = layer.module()
    weights = [] if module is None else [p for p in module._parameters.values() if p is not None and not nn.parameter.is_lazy(p)]
    work = num = 0.0
    for given, output, _ in layer.seen:
        num += given.numel() + output.numel() + sum(p.numel() for p in weights)
        work += _multiplications(module, given.numel(), output.numel())
    if len(layer.seen) < layer.num or not type(module).__module__.startswith("torch.nn"):
        work = num = math.nan  # not one tensor in and one out, or somebody's own: how much there was to do is not known
    return LayerTime(
        layer.path, type(module).__name__, str(layer.seen[0][2]).removeprefix("torch.") if layer.seen else "", layer.num,
        layer.forward_ns / 1e6, layer.backward_ns / 1e6 if layer.num_backwards == layer.num else math.nan, work, num,
    )  # fmt: skip


def _multiplications(module: nn.Module | None, num_in: int, num_out: int) -> float:
    """What a matrix product or a convolution has to multiply; 0 for layers that have none."""
    weight = None if module is None else module._parameters.get("weight")
    if weight is None:
        return 0.0
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return num_in * weight.numel() / weight.shape[0]
    if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
        return num_out * weight.numel() / weight.shape[0]
    return 0.0
