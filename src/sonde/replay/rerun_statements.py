"""Runs the current step again, in a copy of the process: the statements that compute its loss, on the same inputs and with the same random
numbers.

Torch's generator is set to the state that it had when each forward began. Other generators, buffers and attributes are as they were when
the number was found bad.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from sonde.capture.monkeypatch import override
from sonde.capture.step_inputs_for_replay import ForwardCall, ReplayBuffer
from sonde.errors import CannotReplay
from sonde.leaks.autograd_graphs_alive import graph_nodes
from sonde.nonfinite.operation_tracer import is_finite
from sonde.replay.earlier_micro_batches import EarlierBatch, Select
from sonde.replay.replay_without_other_ranks import forbid_collectives, num_processes
from sonde.replay.statements_that_compute_loss import FrameSlice
from sonde.replay.statements_that_compute_value import CALL, ValueQueries
from sonde.replay.variables_read_and_written import MISSING, lookup
from sonde.statistics.find_tensors import find_tensors
from sonde.statistics.private_torch_api import has_accumulation_hooks, unwrap_compiled

MAX_ATTRIBUTES = 32  # of an object that are searched for tensors


@dataclass(slots=True)
class Rerun:
    """Computes the loss of a recorded step again."""

    buffer: ReplayBuffer
    slices: Sequence[FrameSlice]  # of the user's code; empty: only the model can run
    earlier: EarlierBatch | None = None  # a micro-batch that replaces the last one
    num_calls: int = 0  # forward calls of the last run

    def __call__(self, select: Select | None = None) -> Tensor:
        """Runs the slices and returns the loss. `select` may replace the values that they use, by some samples of a batch.

        Raises `CannotReplay`, or the exceptions of the user's code.
        """
        if not self.slices:
            raise CannotReplay("the code that computes the loss cannot be run again")
        if self.earlier is not None:
            select = self.earlier.replace_last(select)

        def call(module: nn.Module) -> Any:
            args, kwargs = self._recorded_inputs(module)
            return module(*args, **kwargs) if select is None else module(*select(args, True), **select(kwargs, True))

        result: Any = None
        with torch.enable_grad(), forbid_collectives(), self._restore_rng_per_call(select), ExitStack() as stack:
            # A scaled loss may overflow only because of its scale.
            stack.callback(override(torch.amp.GradScaler, "scale", lambda original: lambda self, outputs: outputs))
            for part in self.slices:
                variables = {**part.variables, **dict(zip(part.parameters, result))} if part.parameters else part.variables
                result = part.slice.run(variables, select, **{CALL: call})
        if not isinstance(result, Tensor):
            raise CannotReplay(f"backward is called on a {type(result).__name__}, not on a tensor")
        return result

    @property
    def notes(self) -> list[str]:
        """The statements that are not run again, and why."""
        return [note for part in self.slices for note in part.slice.notes]

    @property
    def reads_graph(self) -> bool:
        """Whether the loss is computed from a tensor that has a graph and is not computed again."""
        values = (lookup(part.variables, path) for part in self.slices for path in part.slice.inputs - set(part.parameters))
        return any(tensor.grad_fn is not None for value in values if value is not MISSING for tensor in _tensors_of(value))

    def model_outputs(self, index: int = -1) -> list[Tensor]:
        """The outputs of a recorded forward call, for steps of which only the model can run."""
        if not self.buffer.calls:
            raise CannotReplay("no forward of the model was recorded in this step")
        call = self.buffer.calls[index]
        with torch.enable_grad(), forbid_collectives(), self._restore_rng_per_call(None):
            return [tensor for _, tensor in find_tensors(call.module(*call.args, **call.kwargs)) if tensor.is_floating_point()]

    def _recorded_inputs(self, module: nn.Module) -> tuple[Any, Mapping[str, Any]]:
        for call in reversed(self.buffer.calls):
            if call.module is module or unwrap_compiled(module) is call.module:
                return call.args, call.kwargs
        raise CannotReplay(f"the inputs of {type(module).__name__} were not recorded")

    @property
    def calls(self) -> list[ForwardCall]:
        """The recorded forward calls that the last run repeated; all of them if nothing has run."""
        calls = list(self.buffer.calls)
        return list(self.earlier.calls) if self.earlier is not None else calls[-self.num_calls :] if self.num_calls else calls

    @contextmanager
    def _restore_rng_per_call(self, select: Select | None) -> Iterator[None]:
        """Sets the random state of the recorded call before each forward; for an earlier micro-batch, replaces the inputs too."""
        calls = list(self.buffer.calls)
        has_several_models = len({id(call.module) for call in calls}) > 1
        entered: set[int] = set()
        self.num_calls = 0

        def on_forward_start(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            self.num_calls += 1
            if self.earlier is not None and select is not None:
                call = self.earlier.call_at(self.num_calls - 1, module)
                torch.set_rng_state(call.rng)
                return select(call.args, True), select(call.kwargs, True)
            recorded = _same_call(calls, module, args, kwargs)
            if recorded is None and id(module) not in entered:
                own = [call for call in calls if call.module is module]
                recorded = own[-1 if has_several_models else 0]
            entered.add(id(module))
            if recorded is not None:
                torch.set_rng_state(recorded.rng)
            return None

        with ExitStack() as stack:
            for module in {id(call.module): call.module for call in calls}.values():
                stack.callback(module.register_forward_pre_hook(on_forward_start, with_kwargs=True).remove)
            yield


def gradients(loss: Tensor) -> list[Tensor]:
    """The gradients of the loss with respect to every leaf of its graph. No `.grad` is changed."""
    return [gradient for _, gradient in gradients_by_leaf(loss)]


def gradients_by_leaf(loss: Tensor, scale: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    """The leaves of the loss's graph, each with its gradient. `scale` is the loss scale of a GradScaler, which multiplies the loss."""
    leaves = [node.variable for node in graph_nodes(loss.grad_fn, inf) if isinstance(getattr(node, "variable", None), Tensor)]
    if not leaves:
        return []
    start = torch.full_like(loss, scale)
    found: Sequence[Tensor | None]
    try:
        found = torch.autograd.grad(loss, leaves, start, allow_unused=True, retain_graph=True)  # parts of it may be the training's own
    except RuntimeError as error:
        hooked = num_processes() > 1 or any(has_accumulation_hooks(leaf) for leaf in leaves)  # those of DDP
        if hooked or "checkpoint" not in str(error).lower():
            raise
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(loss, start)  # re-entrant checkpointing refuses torch.autograd.grad
        found = [leaf.grad for leaf in leaves]
    return [(leaf, gradient) for leaf, gradient in zip(leaves, found) if gradient is not None]


def _same_call(calls: list[ForwardCall], module: nn.Module, args: Any, kwargs: Any) -> ForwardCall | None:
    """The last recorded call of this module with the same tensors."""
    passed = [id(tensor) for _, tensor in find_tensors((args, kwargs))]
    same = (call for call in reversed(calls) if call.module is module)
    return next((call for call in same if passed and passed == [id(tensor) for _, tensor in find_tensors((call.args, call.kwargs))]), None)


# ---- predicates for the slicer


def value_queries(buffer: ReplayBuffer) -> ValueQueries:
    """The predicates on values with which the recorded step is sliced."""
    called = {id(call.module) for call in buffer.calls}
    return ValueQueries(
        must_be_recomputed=_must_be_recomputed,
        has_recorded_inputs=lambda value: id(value) in called or id(unwrap_compiled(value)) in called,
    )


def _must_be_recomputed(value: Any) -> bool:
    """Whether a value has a graph, so that it may depend on the model, or is not finite."""
    tensors = _tensors_of(value)
    if any(tensor.grad_fn is not None for tensor in tensors):
        return True
    floating = [tensor for tensor in tensors if tensor.is_floating_point() and not isinstance(tensor, nn.Parameter)]
    return (isinstance(value, float) and value - value != 0) or any(not is_finite(tensor) for tensor in floating)


def _tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a value, also in the attributes of an object: a distribution, or an object with results."""
    if isinstance(value, (nn.Module, torch.optim.Optimizer, type, FunctionType, ModuleType)):
        return []
    tensors = [tensor for _, tensor in find_tensors(value)]
    if not tensors and hasattr(value, "__dict__"):
        tensors = [tensor for _, tensor in find_tensors(dict(list(vars(value).items())[:MAX_ATTRIBUTES]))]
    return tensors
