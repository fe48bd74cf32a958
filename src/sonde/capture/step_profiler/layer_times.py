"""Times each leaf module of a model in one step, forward and backward, and estimates its work.

Forward: from the call of the module to its return. Backward: each autograd node between its input and its output separately, because the
engine may run another branch in between; only for the layers with the longest forward in the last profile, or so far in the first one.
Hooks exist during the profiled step only.
"""

from __future__ import annotations

import heapq
import math
import weakref
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sonde.capture import patches
from sonde.capture.overhead_budget import hook_ns
from sonde.capture.phase_timer import PhaseTimer
from sonde.capture.watched_model import WatchedModel
from sonde.statistics.torch_internals import CONV, CONV_TRANSPOSE, graph_task_id

MAX_LAYERS = 4000  # hooks on more modules would take longer than the step
MAX_CALLS = 64  # per layer whose shapes are recorded
MAX_RECORDED = 40
NUM_SLOWEST = 8  # layers whose backward is timed
MAX_NODES = 16  # per call: a layer of torch.nn has one to five


class LayerTime(NamedTuple):
    """The time of one layer in one step."""

    path: str
    type: str
    dtype: str
    num: int  # calls
    forward_ms: float
    backward_ms: float  # NaN if unknown
    multiplications: float  # of one forward, for layers with a weight matrix; else 0
    elements: float  # of inputs, outputs and weights


class _LayerTiming:
    """Measurements of a leaf module while it runs; the sums are computed at the end of the step."""

    __slots__ = ("backward_ns", "calls", "forward_ns", "has_timed_backward", "module", "num", "num_backwards", "path", "started")

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module = path, weakref.ref(module)
        self.started: list[tuple[int, int]] = []  # a module may call itself
        self.num = self.num_backwards = 0
        self.has_timed_backward = False  # its backward is timed: decided at its first call, because all calls must be timed
        self.forward_ns = self.backward_ns = 0
        self.calls: list[tuple[torch.Size, torch.Size, torch.dtype]] = []  # shapes of input and output, and dtype


class LayerTimes:
    """Times the leaves of models between `attach` and `stop`, by hooks on all modules of the process."""

    def __init__(self, timer: PhaseTimer) -> None:
        self._timer = timer
        self._slowest: frozenset[str] = frozenset()  # of the last profile: only their backward is timed
        self._is_recomputing = False  # forwards are recomputed in backward, so times cannot be assigned
        self._longest_ns: list[int] = []  # forwards of this step, a heap
        self._layers: dict[int, _LayerTiming] = {}  # by id(module)
        self._remove: list[Callable[[], None]] = []
        self._is_active = False
        self._hook_ns = int(hook_ns())

    def attach(self, watched: WatchedModel) -> None:
        """Time the leaves of this model too."""
        started = perf_counter_ns()
        leaves = list(watched.leaves())
        if len(leaves) <= MAX_LAYERS and not watched.has_compiled_parts:
            for path, module in leaves:
                name = ".".join(part for part in (watched.name, path) if part)
                self._layers[id(module)] = _LayerTiming(name, module)
            if not self._is_active:
                self._is_active = True
                self._remove.append(patches.hook_all_modules(before=self._on_start, after=self._on_end))
        self._timer.own_ns += perf_counter_ns() - started

    def stop(self) -> list[LayerTime]:
        """The slowest layers, slowest first."""
        while self._remove:
            self._remove.pop()()
        self._is_active = False
        ran = sorted((layer for layer in self._layers.values() if layer.num), key=lambda layer: -layer.forward_ns)[:MAX_RECORDED]
        self._layers.clear()
        self._longest_ns.clear()
        is_recomputing, self._is_recomputing = self._is_recomputing, False
        self._slowest = frozenset(layer.path for layer in ran[:NUM_SLOWEST])
        return [_summarize(layer, is_recomputing) for layer in ran]

    def _on_start(self, module: nn.Module, args: Any) -> None:
        layer = self._layers.get(id(module))
        if layer is None or layer.module() is not module or torch.compiler.is_compiling():
            return
        # Recomputation in backward and forwards without gradients are not the training's forward.
        if graph_task_id() != -1:
            self._is_recomputing = True
        elif torch.is_grad_enabled():
            layer.started.append((perf_counter_ns(), self._timer.own_ns))

    def _on_end(self, module: nn.Module, args: Any, output: Any) -> None:
        layer = self._layers.get(id(module))
        if layer is None or not layer.started or torch.compiler.is_compiling():
            return
        now, (started, own_ns) = perf_counter_ns(), layer.started.pop()
        took_ns = now - started - (self._timer.own_ns - own_ns)
        layer.forward_ns += took_ns
        layer.num += 1
        first = args[0] if args else None
        if type(output) is Tensor and isinstance(first, Tensor):
            if len(layer.calls) < MAX_CALLS:
                layer.calls.append((first.shape, output.shape, output.dtype))
            if layer.num == 1:
                layer.has_timed_backward = self._is_slow(layer.path, took_ns)
            if layer.has_timed_backward and first is not output and output.grad_fn is not None:
                self._time_backward(layer, first, output)
        self._timer.own_ns += perf_counter_ns() - now + 2 * self._hook_ns

    def _is_slow(self, path: str, took_ns: int) -> bool:
        """Whether a layer is one of the slowest in the last profile, or in this step so far."""
        if self._slowest:
            return path in self._slowest
        if len(self._longest_ns) < NUM_SLOWEST:
            heapq.heappush(self._longest_ns, took_ns)
            return True
        return heapq.heappushpop(self._longest_ns, took_ns) < took_ns

    def _time_backward(self, layer: _LayerTiming, first_input: Tensor, output: Tensor) -> None:
        """Time the autograd nodes of this call."""
        nodes = _nodes_between(first_input, output)
        if not nodes:
            return
        timer, left = self._timer, len(nodes)

        def time_node(node: Any) -> None:
            entered = [0, 0]

            def on_start(gradients: Any) -> None:
                if self._is_active:
                    entered[:] = perf_counter_ns(), timer.own_ns

            def on_end(inputs: Any, gradients: Any) -> None:
                nonlocal left
                if self._is_active and entered[0]:
                    now = perf_counter_ns()
                    layer.backward_ns += max(0, now - entered[0] - (timer.own_ns - entered[1]))
                    entered[0] = 0
                    left -= 1
                    layer.num_backwards += left == 0
                    timer.own_ns += perf_counter_ns() - now + 2 * self._hook_ns

            self._remove.append(node.register_prehook(on_start).remove)
            self._remove.append(node.register_hook(on_end).remove)

        for node in nodes:
            time_node(node)


def _nodes_between(first_input: Tensor, output: Tensor) -> list[Any]:
    """The nodes that a call added to the graph; empty if there are too many, for instance because of other inputs with a graph."""
    end = first_input.grad_fn
    nodes = [output.grad_fn]
    for node in nodes:
        for following, _ in () if node is None else node.next_functions:
            if following is None or following is end or following in nodes or type(following).__name__ == "AccumulateGrad":
                continue
            if len(nodes) == MAX_NODES:
                return []
            nodes.append(following)
    return nodes


def _summarize(layer: _LayerTiming, is_recomputing: bool) -> LayerTime:
    module = layer.module()
    weights = [] if module is None else [p for p in module._parameters.values() if p is not None and not nn.parameter.is_lazy(p)]
    work = num = 0.0
    for input_shape, output_shape, _ in layer.calls:
        num += input_shape.numel() + output_shape.numel() + sum(p.numel() for p in weights)
        work += _multiplications(module, input_shape.numel(), output_shape.numel())
    if len(layer.calls) < layer.num or not type(module).__module__.startswith("torch.nn"):
        work = num = math.nan  # several inputs or outputs, or a module of the user: its work is unknown
    return LayerTime(
        layer.path, type(module).__name__, str(layer.calls[0][2]).removeprefix("torch.") if layer.calls else "", layer.num,
        layer.forward_ns / 1e6, layer.backward_ns / 1e6 if layer.num_backwards == layer.num and not is_recomputing else math.nan, work, num,
    )  # fmt: skip


def _multiplications(module: nn.Module | None, num_in: int, num_out: int) -> float:
    """The number of multiplications of a matrix product or a convolution; 0 for other layers."""
    weight = None if module is None else module._parameters.get("weight")
    if weight is None:
        return 0.0
    if isinstance(module, CONV_TRANSPOSE):
        return num_in * weight.numel() / weight.shape[0]
    if isinstance(module, (nn.Linear, *CONV)):
        return num_out * weight.numel() / weight.shape[0]
    return 0.0
