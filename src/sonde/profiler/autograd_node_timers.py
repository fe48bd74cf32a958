"""Nodes of the autograd graph tell the tape when they begin.

Not full backward hooks: those put nodes of their own around a module, fail on in-place successors and never fire on outputs that are no
tensors. A hook before a node is given the gradients and answers nothing, so the numbers are what they would have been.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from sonde.profiler.time_trace import Call, Tape
from sonde.statistics.tensor_utils import find_tensors

MAX_NODES = 200_000  # of one step: a longer graph is not looked at further, and what is beyond counts to the nodes before it
_LEAF = 1 << 62  # nodes that accumulate into parameters are numbered from above: they run at once, on the account of who fed them


class Nodes:
    """The hooks of one step, taken off when it is over: a graph may be kept for longer."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._handles: list[Any] = []
        self._hooks: dict[int, Callable[[Any], None]] = {}
        tape.on_repeat = self.repeated

    def hook(self, roots: Iterable[torch.Tensor], first: int = 0) -> None:
        """All nodes that the backward of these tensors will run and that were made from number `first` on."""
        owner = self._tape.owner
        seen: set[Any] = set()
        todo = [root.grad_fn for root in roots if root.grad_fn is not None]
        while todo and len(self._handles) < MAX_NODES:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            number = node._sequence_nr()
            if number >= _LEAF or number < first:
                continue
            self._handles.append(node.register_prehook(self._hook_of(owner(number))))
            todo += [below for below, _ in node.next_functions if below is not None]

    def repeated(self, output: Any, first: int) -> None:
        """Re-entrant checkpointing differentiates what it computed again by a backward of its own. The other kind only wants the values."""
        if torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
            self.hook((tensor for _, tensor in find_tensors(output)), first)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks.clear()

    def _hook_of(self, owner: Call) -> Callable[[Any], None]:
        hook = self._hooks.get(id(owner))
        if hook is None:
            tape = self._tape
            append, read = tape.marks.append, tape.read

            def hook(gradients: Any) -> None:
                if torch.compiler.is_compiling():
                    return
                if tape.thread:
                    append((read(), owner))

            self._hooks[id(owner)] = hook
        return hook
