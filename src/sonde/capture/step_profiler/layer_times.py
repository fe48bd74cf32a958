"""How long each leaf of a model took in one step, and how much there was to compute.

Forward: from the call of the module to its return. Backward: the nodes of the graph between its input and its output, each by itself,
since the engine may do another branch in between; for those whose forward took longest the last time, or so far where there was none. Hooks
are on during the step that is looked at, and at no other time.
"""

from __future__ import annotations

import heapq
import math
import weakref
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sonde.capture.standins import Desk
from sonde.capture.watched_model import InertCopy, Watched

MAX_LAYERS = 4000  # hooks on more would take longer than the step
MAX_CALLS = 64  # of one layer whose shapes are noted
MAX_TOLD = 40
NUM_SLOWEST = 8  # layers whose backward is timed
MAX_NODES = 16  # of one call: a layer of torch.nn has one to five


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

    __slots__ = ("backward_ns", "began", "followed", "forward_ns", "module", "num", "num_backwards", "path", "seen", "times")

    def __init__(self, times: LayerTimes, path: str, module: nn.Module) -> None:
        self.times, self.path, self.module = times, path, weakref.ref(module)
        self.began: list[tuple[int, int]] = []  # a module may call itself
        self.num = self.num_backwards = 0
        self.followed = False  # into backward: settled at its first call, since a part of the calls would tell nothing
        self.forward_ns = self.backward_ns = 0
        self.seen: list[tuple[torch.Size, torch.Size, torch.dtype]] = []  # of each call: what went in, what came out


class _Before(InertCopy):
    def __init__(self, layer: _Layer) -> None:
        self.layer = layer

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        # Recomputation in backward and forwards without gradients are not the training's forward.
        if torch._C._current_graph_task_id() != -1:
            self.layer.times.recomputes = True
        elif torch.is_grad_enabled():
            self.layer.began.append((perf_counter_ns(), self.layer.times.desk.own_ns))


class _After(InertCopy):
    def __init__(self, layer: _Layer) -> None:
        self.layer = layer

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self.layer.began:
            return
        now, (began, own_ns) = perf_counter_ns(), self.layer.began.pop()
        layer, desk = self.layer, self.layer.times.desk
        took_ns = now - began - (desk.own_ns - own_ns)
        layer.forward_ns += took_ns
        layer.num += 1
        given = args[0] if args else None
        if type(output) is Tensor and isinstance(given, Tensor):
            if len(layer.seen) < MAX_CALLS:
                layer.seen.append((given.shape, output.shape, output.dtype))
            if layer.num == 1:
                layer.followed = layer.times.is_slow(layer.path, took_ns)
            if layer.followed and given is not output and output.grad_fn is not None:
                layer.times.follow(layer, given, output)
        desk.own_ns += perf_counter_ns() - now + 2 * desk.hook_ns


class LayerTimes:
    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.slowest: frozenset[str] = frozenset()  # of the last time: only of these the backward is timed
        self.recomputes = False  # forwards run again during backward: whose time is whose is not known then
        self._longest_ns: list[int] = []  # forwards of this step, a heap
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
        self._longest_ns.clear()
        recomputes, self.recomputes = self.recomputes, False
        self.slowest = frozenset(layer.path for layer in ran[:NUM_SLOWEST])
        return [_told(layer, recomputes) for layer in ran]

    def is_slow(self, path: str, took_ns: int) -> bool:
        """One of the slowest of the last time, or of those that ran so far."""
        if self.slowest:
            return path in self.slowest
        if len(self._longest_ns) < NUM_SLOWEST:
            heapq.heappush(self._longest_ns, took_ns)
            return True
        return heapq.heappushpop(self._longest_ns, took_ns) < took_ns

    def follow(self, layer: _Layer, given: Tensor, output: Tensor) -> None:
        """Into backward: how long the nodes of this call take."""
        nodes = _nodes_between(given, output)
        if not nodes:
            return
        desk, left = self.desk, len(nodes)

        def wait_for(node: Any) -> None:
            came = [0, 0]

            def begins(gradients: Any) -> None:
                if self._on:
                    came[:] = perf_counter_ns(), desk.own_ns

            def ended(given: Any, gradients: Any) -> None:
                nonlocal left
                if self._on and came[0]:
                    now = perf_counter_ns()
                    layer.backward_ns += max(0, now - came[0] - (desk.own_ns - came[1]))
                    came[0] = 0
                    left -= 1
                    layer.num_backwards += left == 0
                    desk.own_ns += perf_counter_ns() - now + 2 * desk.hook_ns

            self._handles.append(node.register_prehook(begins))
            self._handles.append(node.register_hook(ended))

        for node in nodes:
            wait_for(node)


def _nodes_between(given: Tensor, output: Tensor) -> list[Any]:
    """The nodes that a call added to the graph; none where there are too many, as when it took more from elsewhere."""
    end = given.grad_fn
    nodes = [output.grad_fn]
    for node in nodes:
        for following, _ in () if node is None else node.next_functions:
            if following is None or following is end or following in nodes or type(following).__name__ == "AccumulateGrad":
                continue
            if len(nodes) == MAX_NODES:
                return []
            nodes.append(following)
    return nodes


def _told(layer: _Layer, recomputes: bool) -> LayerTime:
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
        layer.forward_ns / 1e6, layer.backward_ns / 1e6 if layer.num_backwards == layer.num and not recomputes else math.nan, work, num,
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
