"""The tape: what happened in one step, in order, with a reading at each event. Nothing is computed while the step runs.

A reading is a clock's, or that of any counter that only goes up: FLOPs and bytes are laid to the modules' account in the same way as
time. In the forward, a call of a module has a reading at both ends. Autograd numbers its nodes as they are made, so the numbers at which
calls begin and end tell later which call made a node. In the backward, each node that begins leaves a mark: from there to the next mark
everything is its owner's. Gradients are accumulated right after the node that made them, and so come onto the same account.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]

Read = Callable[[], int]
Around = Callable[[Any, Any], AbstractContextManager[Any]]  # of the arguments of the outermost forward; of (), {} for a backward


class Call:
    """One call of a module's forward."""

    __slots__ = ("back", "back_all", "began", "ended", "inside", "layer", "marks", "marks_all", "num_all", "num_inside", "parent")

    def __init__(self, layer: int, parent: Call | None) -> None:
        self.layer, self.parent = layer, parent
        self.began = self.ended = -1
        # What follows is added up when the tape is read.
        self.inside = self.num_inside = self.num_all = 0  # reading and number of the calls inside; number of all within
        self.back = self.back_all = 0  # reading of its nodes, and of those of all within
        self.marks = self.marks_all = 0  # number of these nodes


ENGINE = Call(-1, None)  # owns what autograd does before the first node
OURS = Call(-2, None)  # owns what the profiler does in the middle of a backward: nobody's cost
LOSS = Call(-3, None)  # owns nodes that were made outside of all modules


class Tape:
    """Records what the thread that started it does; a tape that is not running costs its callers a comparison."""

    def __init__(self, read: Read = perf_counter_ns, around: Around | None = None) -> None:
        self.read, self.around = read, around
        self.thread = 0
        self.calls: list[Call] = []
        self.marks: list[tuple[int, Call]] = []  # of all backwards
        self.ends: list[tuple[int, int, int]] = []  # of each backward: its first mark, the mark after its last, its last reading
        self.in_backward = False
        self.trains = False  # calls from outside that are not differentiated are none of its business
        self.failure = ""
        self.on_repeat: Callable[[Any, int], None] | None = None  # a module was called again in the backward: output, first number
        self._top: Call | None = None
        self._numbers: list[int] = []  # of nodes: from each of these on …
        self._owners: list[Call] = []  # … they are made by this call
        self._latest: dict[int, Call] = {}

    def start(self) -> None:
        self.thread = get_ident()

    def stop(self) -> None:
        """Also after an exception, from wherever."""
        self.thread = 0
        self._top = None
        if self.in_backward:
            self.backward_ended()

    def broke(self, error: Exception) -> None:
        """The profiler itself failed: this step is not kept, and the model runs on."""
        self.failure = f"{type(error).__name__}: {error}"
        self.thread = 0

    @property
    def is_outside(self) -> bool:
        """Is the next call an outermost one?"""
        return self._top is None and not self.in_backward

    # -- forward -----------------------------------------------------------------------------------

    def enter(self, layer: int) -> Call:
        if self.in_backward:
            return self._enter_again(layer)
        call = Call(layer, self._top)
        self.calls.append(call)
        self._latest[layer] = call
        self._top = call
        self._numbers.append(_get_sequence_nr())
        self._owners.append(call)
        call.began = self.read()
        return call

    def leave(self, call: Call, output: Any) -> None:
        if self.in_backward:
            self._leave_again(call, output)
            return
        call.ended = self.read()
        self._top = call.parent
        self._numbers.append(_get_sequence_nr())
        self._owners.append(call.parent or LOSS)

    # Activation checkpointing calls modules again from inside the backward. That is part of what their backward costs, and goes onto
    # the account of the call that it repeats.

    def _enter_again(self, layer: int) -> Call:
        again = Call(layer, self._top)
        again.began, again.ended = len(self.marks), _get_sequence_nr()
        self._top = again
        owner = self._latest.get(layer)
        if owner is None:
            owner = self._latest[layer] = Call(layer, None)
            self.calls.append(owner)
        self._numbers.append(again.ended)
        self._owners.append(owner)
        self.marks.append((self.read(), owner))
        return again

    def _leave_again(self, again: Call, output: Any) -> None:
        self._top = again.parent
        back = self._latest[again.parent.layer] if again.parent is not None else self.marks[again.began - 1][1]
        self._numbers.append(_get_sequence_nr())
        self._owners.append(back)
        if again.parent is None and self.on_repeat is not None:
            self.marks.append((self.read(), OURS))
            self.on_repeat(output, again.ended)
        self.marks.append((self.read(), back))

    # -- backward ----------------------------------------------------------------------------------

    def owner(self, number: int) -> Call:
        """The call in which the node of this number was made."""
        at = bisect_right(self._numbers, number) - 1
        return self._owners[at] if at >= 0 else LOSS

    def backward_begins(self) -> None:
        self.in_backward, self._top = True, None
        self.ends.append((len(self.marks), 0, 0))
        self.marks.append((self.read(), ENGINE))

    def backward_ended(self) -> None:
        now = self.read()
        first, _, _ = self.ends.pop()
        self.ends.append((first, len(self.marks), now))
        self.in_backward, self._top = False, None
