"""Times each leaf module of the watched models in one step, forward and backward, and estimates its work.

The timers of capture/layer_timing are installed during the profiled step, with a clock that stands still while Sonde works.
"""

import math
from collections.abc import Iterable
from threading import get_ident
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn

from sonde.capture.choose_observed_steps import hook_ns
from sonde.capture.layer_timing.autograd_node_timers import AutogradNodeTimers
from sonde.capture.layer_timing.forward_timers import ModuleTimers
from sonde.capture.layer_timing.layer_call_trace import LayerCallTrace
from sonde.capture.layer_timing.layer_times_from_trace import ModuleCost, evaluate
from sonde.capture.step_phase_timer import PhaseTimer
from sonde.capture.watched_model import WatchedModel
from sonde.statistics.find_tensors import find_tensors
from sonde.statistics.private_torch_api import CONV, CONV_TRANSPOSE, graph_task_id

MAX_LAYERS = 4000  # hooks on more modules would take longer than the step
MAX_CALLS = 64  # per layer whose shapes are recorded
MAX_RECORDED = 40


Leaves = list[tuple[str, nn.Module]]  # with paths
CallShapes = list[tuple[torch.Size, torch.Size, torch.dtype]]  # shapes of input and output, and dtype, by call


class LayerTimes:
    """Times the leaves of models between `start` and `stop`, in the thread that starts it."""

    def __init__(self, timer: PhaseTimer) -> None:
        self._timer, self._hook_ns = timer, int(hook_ns())
        self._prepare([])

    def _prepare(self, leaves: Leaves) -> None:
        self._leaves = leaves
        self._shapes: dict[int, CallShapes] = {}
        self._is_backward_known = True
        self._trace = LayerCallTrace(self._read, set_back=self._set_back)
        modules = [module for _, module in leaves]
        self._timers = ModuleTimers(modules, accepts=self._is_training_call, on_output=self._add_shapes)
        self._node_timers = AutogradNodeTimers(self._trace)

    def start(self, models: Iterable[WatchedModel]) -> None:
        """Time the leaves of these models."""
        leaves: Leaves = []
        for watched in models:
            found = list(watched.leaves())
            if len(found) <= MAX_LAYERS and not watched.has_compiled_parts:
                leaves += [(".".join(part for part in (watched.name, path) if part), module) for path, module in found]
        self._prepare(leaves)
        self._timers.install(self._trace, only_roots=False)
        self._trace.start()

    def on_backward_start(self, tensors: Any) -> None:
        if self._trace.thread == get_ident():
            self._node_timers.install(tensor for _, tensor in find_tensors(tensors))
            self._trace.start_backward()
        else:
            self._is_backward_known = False  # it may run nodes of the timed thread, at the same time

    def on_backward_end(self) -> None:
        if self._trace.thread == get_ident() and self._trace.in_backward:
            self._trace.end_backward()

    def stop(self) -> list[dict[str, Any]]:
        """The slowest layers, slowest first. Raises the error that ended the timing early, if there was one."""
        self._trace.stop()
        self._timers.remove()
        self._node_timers.remove()
        trace, leaves, shapes = self._trace, self._leaves, self._shapes
        is_backward_known = self._is_backward_known and self._node_timers.is_complete
        self._prepare([])
        if trace.failure:
            raise RuntimeError(trace.failure)
        costs = evaluate(trace).layers
        slowest = sorted(costs, key=lambda layer: -costs[layer].forward)[:MAX_RECORDED]
        return [_summarize(*leaves[layer], costs[layer], shapes.get(layer, []), is_backward_known) for layer in slowest]

    def _read(self) -> int:
        return perf_counter_ns() - self._timer.own_ns

    def _set_back(self, reading: int) -> None:
        """The time since this reading is Sonde's own, and so is what torch needs to call a hook."""
        self._timer.own_ns = perf_counter_ns() - reading + self._hook_ns

    def _is_training_call(self) -> bool:
        is_recomputation = graph_task_id() != -1  # code between the layers would count for the layer whose node started it
        if not is_recomputation and not torch.is_grad_enabled():
            return False
        is_timed = not is_recomputation and self._trace.thread == get_ident()  # each thread numbers its autograd nodes from 0
        self._is_backward_known = self._is_backward_known and is_timed
        return is_timed

    def _add_shapes(self, layer: int, args: Any, output: Any) -> None:
        first, calls = args[0] if args else None, self._shapes.setdefault(layer, [])
        if type(output) is Tensor and isinstance(first, Tensor) and len(calls) < MAX_CALLS and not (output.is_nested or first.is_nested):
            calls.append((first.shape, output.shape, output.dtype))


def _summarize(path: str, module: nn.Module, cost: ModuleCost, calls: CallShapes, is_backward_known: bool) -> dict[str, Any]:
    """A row of the event `StepProfile`."""
    weights = [p for p in module._parameters.values() if p is not None and not nn.parameter.is_lazy(p)]
    work = num = 0.0
    for input_shape, output_shape, _ in calls:
        num += input_shape.numel() + output_shape.numel() + sum(p.numel() for p in weights)
        work += _multiplications(module, input_shape.numel(), output_shape.numel())
    if len(calls) < cost.calls or not type(module).__module__.startswith("torch.nn"):
        work = num = math.nan  # several inputs or outputs, or a module of the user: its work is unknown
    return {
        "path": path, "type": type(module).__name__, "dtype": str(calls[0][2]).removeprefix("torch.") if calls else "", "num": cost.calls,
        "forward_ms": cost.forward / 1e6,
        "backward_ms": max(0, cost.backward) / 1e6 if is_backward_known and cost.num_nodes else math.nan,
        "multiplications": work, "elements": num,
    }  # fmt: skip


def _multiplications(module: nn.Module, num_in: int, num_out: int) -> float:
    """The number of multiplications of a matrix product or a convolution; 0 for other layers."""
    weight = module._parameters.get("weight")
    if weight is None or not isinstance(module, (nn.Linear, *CONV)):
        return 0.0
    return (num_in if isinstance(module, CONV_TRANSPOSE) else num_out) * weight.numel() / weight.shape[0]
