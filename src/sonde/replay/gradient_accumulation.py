"""Gradients are added up over micro-batches, and a micro-batch before the last may have spoilt them.

Its loss was good, or it would have been looked at then; only the sum is bad, when the update comes. The inputs of the last few forwards are
kept, so each micro-batch can take the place of the last: at the model's door, and wherever the code that makes the loss uses them. What
else it used (its labels) is gone: the last one's stand in, and that is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sonde.capture.replay_buffer import ForwardCall
from sonde.replay.program_slice import CannotReplay
from sonde.statistics.tensor_utils import find_tensors

Pick = Callable[[Any, bool], Any]  # (a value, may it be a flattened batch): some samples of it


@dataclass(frozen=True, slots=True)
class Earlier:
    """A micro-batch that stands in for the last one."""

    calls: Sequence[ForwardCall]  # its forwards
    back: int  # how many micro-batches before the last
    num: int  # of micro-batches that are known
    instead: dict[int, Tensor]  # its tensors, by the ids of those of the last whose place they take

    def then(self, pick: Pick | None) -> Pick:
        """Puts this micro-batch in the place of the last, and then picks of it."""

        def picked(value: Any, flat: bool) -> Any:
            mine = self._swapped(value)
            return mine if pick is None else pick(mine, flat)

        return picked

    def number(self, index: int, module: nn.Module) -> ForwardCall:
        """The call that stands in for this one of the run."""
        if index >= len(self.calls) or self.calls[index].module is not module:
            raise CannotReplay("on that micro-batch the models would be called in another order")
        return self.calls[index]

    def _swapped(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.instead.get(id(value), value)
        if isinstance(value, dict):
            return {key: self._swapped(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._swapped(item) for item in value)
        return value

    @property
    def caveat(self) -> str:
        place = self.num - self.back
        which = f"micro-batch {place} of the last {self.num} before the update"
        return f"it comes from {which}; its labels are gone, and those of the last stood in"


def earlier_batches(calls: Sequence[ForwardCall], num_calls: int) -> Iterator[Earlier]:
    """The micro-batches before the last, the first one first; each loss takes so many calls."""
    if not num_calls:
        return
    last, num = calls[-num_calls:], len(calls) // num_calls
    for back in range(num - 1, 0, -1):
        end = len(calls) - back * num_calls
        mine = calls[end - num_calls : end]
        pairs = [(_tensors(then), _tensors(now)) for then, now in zip(mine, last)]
        if all(then.module is now.module for then, now in zip(mine, last)) and all(len(then) == len(now) for then, now in pairs):
            yield Earlier(mine, back, num, {id(now): then for thens, nows in pairs for then, now in zip(thens, nows)})


def _tensors(call: ForwardCall) -> list[Tensor]:
    return [tensor for _, tensor in find_tensors((call.args, call.kwargs))]
