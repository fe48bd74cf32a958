"""Runs the step that is under way again: the statements that made its loss, on the same inputs and with the same random numbers.

It is meant to run inside `restore.as_before`, which takes back what it changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from sonde.capture.replay_buffer import ForwardCall, ReplayBuffer
from sonde.capture.torch_internals import unwrap_compiled
from sonde.nonfinite.tracer import is_finite
from sonde.replay.backward_call_site import Part
from sonde.replay.distributed import num_processes, silence
from sonde.replay.gradient_accumulation import Earlier, Pick
from sonde.replay.program_slice import CALL, CannotReplay, Reader
from sonde.replay.statement_effects import MISSING, lookup
from sonde.statistics.tensor_utils import find_tensors

MAX_ATTRIBUTES = 32


@dataclass(slots=True)
class Rerun:
    kept: ReplayBuffer
    parts: Sequence[Part]  # of the user's code; empty: only the model can be run
    earlier: Earlier | None = None  # a micro-batch before the last, which takes its place
    num_calls: int = 0  # forwards that the last run made

    def __call__(self, pick: Pick | None = None) -> Tensor:
        """The loss, made again; `pick` may put other inputs in the place of those that were used."""
        if not self.parts:
            raise CannotReplay("the code that makes the loss cannot be run again")
        if self.earlier is not None:
            pick = self.earlier.then(pick)

        def call(module: nn.Module) -> Any:
            args, kwargs = self._inputs(module)
            return module(*args, **kwargs) if pick is None else module(*pick(args, True), **pick(kwargs, True))

        made: Any = None
        with torch.enable_grad(), silence(), self._at_the_doors(pick), _without_loss_scale():
            for part in self.parts:
                names = {**part.names, **dict(zip(part.binds, made))} if part.binds else part.names
                made = part.slice.run(names, pick, **{CALL: call})
        if not isinstance(made, Tensor):
            raise CannotReplay(f"what is handed to backward is {type(made).__name__}, not a tensor")
        return made

    def refuse_loans(self) -> None:
        """Raises where a part of the loss was not made again but taken as it is, graph and all: that graph is the training's own, and a
        backward through it would use it up."""
        for part in self.parts:
            for place in sorted(part.slice.uncovered - set(part.binds)):
                value = lookup(part.names, place)
                if value is not MISSING and any(tensor.grad_fn is not None for _, tensor in find_tensors(value)):
                    notes = [note for note in part.slice.notes if "hands it out" not in note]
                    raise CannotReplay("; ".join(notes[:3]) or f"{place} could not be made again")

    def outputs(self) -> list[Tensor]:
        """What the model puts out, where no more can be run than that."""
        if not self.kept.calls:
            raise CannotReplay("no forward of the model was seen in this step")
        last = self.kept.calls[-1]
        with torch.enable_grad(), silence(), self._at_the_doors(None):
            return [tensor for _, tensor in find_tensors(last.module(*last.args, **last.kwargs)) if tensor.is_floating_point()]

    def _inputs(self, module: nn.Module) -> tuple[Any, Mapping[str, Any]]:
        for call in reversed(self.kept.calls):
            if call.module is module or unwrap_compiled(module) is call.module:
                return call.args, call.kwargs
        raise CannotReplay(f"the inputs of {type(module).__name__} were not kept")

    @property
    def calls(self) -> list[ForwardCall]:
        """The forwards that the last run made again, as they were in the step; all that are kept where nothing ran."""
        kept = list(self.kept.calls)
        return list(self.earlier.calls) if self.earlier is not None else kept[-self.num_calls :] if self.num_calls else kept

    @contextmanager
    def _at_the_doors(self, pick: Pick | None) -> Iterator[None]:
        """Each forward begins with the random numbers that it began with in the step; of an earlier micro-batch, with its inputs too."""
        calls = list(self.kept.calls)
        several = len({id(call.module) for call in calls}) > 1
        met: set[int] = set()
        self.num_calls = 0

        def entering(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            self.num_calls += 1
            if self.earlier is not None and pick is not None:
                call = self.earlier.number(self.num_calls - 1, module)
                torch.set_rng_state(call.rng)
                return pick(call.args, True), pick(call.kwargs, True)
            known = _same_call(calls, module, args, kwargs)
            if known is None and id(module) not in met:
                own = [call for call in calls if call.module is module]
                known = own[-1 if several else 0]
            met.add(id(module))
            if known is not None:
                torch.set_rng_state(known.rng)
            return None

        with ExitStack() as stack:
            for module in {id(call.module): call.module for call in calls}.values():
                stack.callback(module.register_forward_pre_hook(entering, with_kwargs=True).remove)
            yield


def gradients(loss: Tensor) -> list[Tensor]:
    """Of the loss with respect to every leaf that it depends on. No `.grad` is written to."""
    return [gradient for _, gradient in gradients_by_leaf(loss)]


def gradients_by_leaf(loss: Tensor, scale: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    """Each leaf with its gradient; `scale` is that of a GradScaler, which multiplies the loss."""
    leaves = _leaves(loss)
    if not leaves:
        return []
    start = torch.full_like(loss, scale)
    found: Sequence[Tensor | None]
    try:
        found = torch.autograd.grad(loss, leaves, start, allow_unused=True)
    except RuntimeError as error:
        hooked = num_processes() > 1 or any(getattr(leaf, "_post_accumulate_grad_hooks", None) for leaf in leaves)  # DDP has its own
        if hooked or "checkpoint" not in str(error).lower():
            raise
        found = _by_backward(loss, leaves, start)  # re-entrant checkpointing knows no other way
    return [(leaf, gradient) for leaf, gradient in zip(leaves, found) if gradient is not None]


def _by_backward(loss: Tensor, leaves: list[Tensor], start: Tensor) -> list[Tensor | None]:
    before = [leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(loss, start)
        return [leaf.grad for leaf in leaves]
    finally:
        for leaf, gradient in zip(leaves, before):
            leaf.grad = gradient


def _leaves(loss: Tensor) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    seen: set[Any] = set()
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found[id(variable)] = variable
        todo += [below for below, _ in node.next_functions]
    return list(found.values())


def _same_call(calls: list[ForwardCall], module: nn.Module, args: Any, kwargs: Any) -> ForwardCall | None:
    given = [id(tensor) for _, tensor in find_tensors((args, kwargs))]
    same = (call for call in reversed(calls) if call.module is module)
    return next((call for call in same if given and given == [id(tensor) for _, tensor in find_tensors((call.args, call.kwargs))]), None)


@contextmanager
def _without_loss_scale() -> Iterator[None]:
    """A scaled loss may overflow by the scale alone, which a GradScaler then lowers: the loss itself is what counts."""
    original = torch.amp.GradScaler.scale
    torch.amp.GradScaler.scale = lambda self, outputs: outputs  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.amp.GradScaler.scale = original  # type: ignore[method-assign]


# -- what the slicer asks about values ----------------------------------------------------------------------------------------------------


def reader(kept: ReplayBuffer) -> Reader:
    called = {id(call.module) for call in kept.calls}
    return Reader(
        must_be_made=_must_be_made,
        harmless=lambda value: isinstance(value, nn.Module),
        was_called=lambda value: id(value) in called or id(unwrap_compiled(value)) in called,
    )


def _must_be_made(value: Any) -> bool:
    """Does it depend on the model, or hold a bad number?"""
    if isinstance(value, (nn.Module, torch.optim.Optimizer, type, FunctionType, ModuleType)):
        return False
    tensors = [tensor for _, tensor in find_tensors(value)]
    if not tensors and hasattr(value, "__dict__") and not callable(value):  # a distribution, an object with results
        tensors = [tensor for _, tensor in find_tensors(dict(list(vars(value).items())[:MAX_ATTRIBUTES]))]
    if any(tensor.grad_fn is not None for tensor in tensors):
        return True
    floating = [tensor for tensor in tensors if tensor.is_floating_point() and not isinstance(tensor, nn.Parameter)]
    return (isinstance(value, float) and value - value != 0) or any(not is_finite(tensor) for tensor in floating)
