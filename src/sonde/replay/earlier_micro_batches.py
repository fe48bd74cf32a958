"""Replays an earlier micro-batch of an accumulated gradient.

The loss of each micro-batch was finite, but the sum of the gradients is not when the update begins. The inputs of the last few forwards
are stored, so each micro-batch can replace the last one: at the calls of the model, and wherever the code that computes the loss uses
these tensors. Other values of the micro-batch (its labels) are not stored; those of the last micro-batch are used, and a caveat says so.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sonde.capture.step_inputs_for_replay import ForwardCall
from sonde.errors import CannotReplay
from sonde.statistics.find_tensors import find_tensors

Select = Callable[[Any, bool], Any]  # select(value, flat) returns other samples of a value; flat: it may be a flattened batch


@dataclass(frozen=True, slots=True)
class EarlierBatch:
    """A micro-batch that replaces the last one in a replay."""

    calls: Sequence[ForwardCall]  # its forward calls
    batches_ago: int  # counted from the last micro-batch
    num: int  # micro-batches with stored inputs
    replacements: dict[int, Tensor]  # ids of tensors of the last micro-batch → tensors of this one

    def replace_last(self, select: Select | None) -> Select:
        """A `select` that first replaces tensors of the last micro-batch by those of this one, then applies `select` if there is one."""

        def replaced(value: Any, flat: bool) -> Any:
            own = map_tensors(lambda tensor: self.replacements.get(id(tensor), tensor), value)
            return own if select is None else select(own, flat)

        return replaced

    def call_at(self, index: int, module: nn.Module) -> ForwardCall:
        """The forward call of this micro-batch that replaces call number `index` of the replay. Raises `CannotReplay`."""
        if index >= len(self.calls) or self.calls[index].module is not module:
            raise CannotReplay("that micro-batch called the models in another order")
        return self.calls[index]

    @property
    def caveat(self) -> str:
        which = f"micro-batch {self.num - self.batches_ago} of the last {self.num} before the update"
        return f"it comes from {which}; its labels are not stored, so those of the last micro-batch were used"


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with each tensor in it replaced by `function(tensor)`."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return type(value)(map_tensors(function, item) for item in value) if type(value) in (list, tuple) else value


def earlier_batches(calls: Sequence[ForwardCall], calls_per_loss: int) -> Iterator[EarlierBatch]:
    """The micro-batches before the last one, the oldest first."""
    if not calls_per_loss:
        return
    last, num = calls[-calls_per_loss:], len(calls) // calls_per_loss
    for batches_ago in range(num - 1, 0, -1):
        end = len(calls) - batches_ago * calls_per_loss
        own = calls[end - calls_per_loss : end]
        pairs = [(_tensors(then), _tensors(now)) for then, now in zip(own, last)]
        if all(then.module is now.module for then, now in zip(own, last)) and all(len(then) == len(now) for then, now in pairs):
            yield EarlierBatch(own, batches_ago, num, {id(now): then for thens, nows in pairs for then, now in zip(thens, nows)})


def _tensors(call: ForwardCall) -> list[Tensor]:
    return [tensor for _, tensor in find_tensors((call.args, call.kwargs))]
