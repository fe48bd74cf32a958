"""Trace of one measured step: the start and end of every module call, and the start of every autograd node, each with a counter reading.

The counter is a clock, or any other counter that only increases, such as FLOPs; layer_times_from_trace.py evaluates the trace afterwards.
Autograd numbers its nodes in the order of their creation, so the node numbers at the start and end of a call identify the nodes that the
call created. Each node that starts adds a mark; everything until the next mark belongs to the call that created the node.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from sonde.statistics.private_torch_api import next_sequence_nr

ReadCounter = Callable[[], int]
CallContext = Callable[[Any, Any], AbstractContextManager[Any]]  # from args and kwargs of an outermost forward; from (), {} for a backward


class LayerCall:
    """One forward call of one module."""

    __slots__ = (
        "backward", "backward_total", "children", "end", "layer", "num_children", "num_descendants", "num_nodes", "num_nodes_total",
        "parent", "start",
    )  # fmt: skip

    def __init__(self, layer: int, parent: LayerCall | None) -> None:
        self.layer, self.parent = layer, parent
        self.start = self.end = -1  # readings; -1 until the call starts and ends
        # The sums below are filled in when the trace is evaluated (layer_times_from_trace.py).
        self.children = self.num_children = self.num_descendants = 0  # reading and number of the direct calls inside; number of all inside
        self.backward = self.backward_total = 0  # reading of its own nodes; with those of the calls inside
        self.num_nodes = self.num_nodes_total = 0


# Owners of marks that belong to no module call.
ENGINE = LayerCall(-1, None)  # autograd, before the first node
PROFILER = LayerCall(-2, None)  # work of the profiler inside a backward: excluded from all costs
OUTSIDE = LayerCall(-3, None)  # nodes created outside of all modules: the loss


class LayerCallTrace:
    """Records the module calls and backward passes of the thread that started it."""

    def __init__(
        self, read: ReadCounter = perf_counter_ns, context: CallContext | None = None, set_back: Callable[[int], None] | None = None
    ) -> None:
        """`context` is entered around every outermost forward call: the FLOP counter and the saved-tensor hooks. `set_back` sets the
        counter back to an earlier reading: the timers call it when they are done, so that their work does not count."""
        self.read, self.context, self.set_back = read, context, set_back
        self.thread = 0  # 0: not running
        self.calls: list[LayerCall] = []
        self.marks: list[tuple[int, LayerCall]] = []  # of all backward passes
        self.backwards: list[tuple[int, int, int]] = []  # per backward: index of its first mark, index after its last, last reading
        self.in_backward = False
        self.requires_grad_mode = False  # ignore outermost calls under no_grad: validation between two training steps
        self.failure = ""
        self.on_recomputed: Callable[[Any, int], None] | None = None  # called with output and first node number of a repeated forward
        self._current: LayerCall | None = None
        self._contexts = ExitStack()  # of the outermost call that runs
        self._first_nodes: list[int] = []  # nodes from each of these numbers on …
        self._creators: list[LayerCall] = []  # … are created by this call
        self._latest: dict[int, LayerCall] = {}  # by layer

    def start(self) -> None:
        self.thread = get_ident()

    def stop(self) -> None:
        """Ends the recording; also works in the middle of a forward or backward that raised."""
        self.thread = 0
        self._current = None
        self._contexts.close()
        if self.in_backward:
            self.end_backward()

    def fail(self, error: Exception) -> None:
        """Stores an error of the profiler itself and stops recording: the step is discarded, the model runs on."""
        self.failure = f"{type(error).__name__}: {error}"
        self.thread = 0
        self._contexts.close()

    @property
    def is_outermost(self) -> bool:
        """True if the next forward call is not inside another one."""
        return self._current is None and not self.in_backward

    # -- forward -----------------------------------------------------------------------------------

    def enter_context(self, context: AbstractContextManager[Any]) -> None:
        """Enters a context that ends with the outermost call which starts next."""
        self._contexts.enter_context(context)

    def start_call(self, layer: int) -> LayerCall | None:
        """The call; None if it repeats one inside the backward."""
        if self.in_backward:
            self._start_recomputation(layer)
            return None
        call = LayerCall(layer, self._current)
        self.calls.append(call)
        self._latest[layer] = call
        self._current = call
        self._first_nodes.append(next_sequence_nr())
        self._creators.append(call)
        call.start = self.read()
        return call

    def end_call(self, layer: int, output: Any) -> LayerCall | None:
        """Ends the innermost call of this layer. Calls inside it that never ended (a BaseException passed through them) are dropped.
        Returns the call; None if its start was not recorded, or if it repeats one inside the backward."""
        end = self.read()
        call = self._current
        while call is not None and call.layer != layer:
            call = call.parent
        if call is None:
            return None  # the trace started later, or the call ran under no_grad
        if self.in_backward:
            self._end_recomputation(call, output)
            return None
        call.end = end
        self._current = call.parent
        self._first_nodes.append(next_sequence_nr())
        self._creators.append(call.parent or OUTSIDE)
        if call.parent is None:
            self._contexts.close()
        return call

    # Activation checkpointing calls modules again inside the backward. These calls are part of the backward cost of the call that they
    # repeat. `start` is the index of the next mark, `end` the number of the next node.

    def _start_recomputation(self, layer: int) -> None:
        repeated = LayerCall(layer, self._current)
        repeated.start, repeated.end = len(self.marks), next_sequence_nr()
        self._current = repeated
        owner = self._latest.get(layer)
        if owner is None:
            owner = self._latest[layer] = LayerCall(layer, None)
            self.calls.append(owner)
        self._first_nodes.append(repeated.end)
        self._creators.append(owner)
        self.marks.append((self.read(), owner))

    def _end_recomputation(self, repeated: LayerCall, output: Any) -> None:
        self._current = parent = repeated.parent
        owner = self._latest[parent.layer] if parent is not None else self.marks[repeated.start - 1][1]
        self._first_nodes.append(next_sequence_nr())
        self._creators.append(owner)
        if parent is None and self.on_recomputed is not None:
            self.marks.append((self.read(), PROFILER))
            self.on_recomputed(output, repeated.end)
        self.marks.append((self.read(), owner))

    # -- backward ----------------------------------------------------------------------------------

    def creator(self, node_number: int) -> LayerCall:
        """The call that created the autograd node with this number."""
        index = bisect_right(self._first_nodes, node_number) - 1
        return self._creators[index] if index >= 0 else OUTSIDE

    def start_backward(self) -> None:
        self.in_backward, self._current = True, None
        self._contexts.close()
        self.backwards.append((len(self.marks), 0, 0))
        self.marks.append((self.read(), ENGINE))

    def end_backward(self) -> None:
        end = self.read()
        first, _, _ = self.backwards.pop()
        self.backwards.append((first, len(self.marks), end))
        self.in_backward, self._current = False, None
