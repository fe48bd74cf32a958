"""Adds a mark to the trace whenever an autograd node starts.

Full backward hooks on modules are not used: they insert nodes of their own around a module and fail when a successor works in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from sonde.capture.layer_timing.layer_call_trace import LayerCall, LayerCallTrace
from sonde.statistics.find_tensors import find_tensors
from sonde.statistics.private_torch_api import has_saved_tensor_hooks, node_sequence_nr

MAX_NODES = 200_000  # per step: the nodes beyond it get no hook, and their time counts for the node before them
_FIRST_LEAF = 1 << 62  # gradient accumulation nodes are numbered from the top; they run right after the node that feeds them


class AutogradNodeTimers:
    """Pre-hooks on the autograd nodes of one step, removed when it ends because the graph may live longer."""

    def __init__(self, trace: LayerCallTrace) -> None:
        self._trace = trace
        self.is_complete = True  # every node has a hook
        self._handles: list[Any] = []
        self._hooks: dict[int, Callable[[Any], None]] = {}  # by id of the call that created the node
        trace.on_recomputed = self._install_on_recomputed

    def install(self, roots: Iterable[torch.Tensor], first_node: int = 0) -> None:
        """Hooks every node that the backward of `roots` runs and whose number is at least `first_node`."""
        creator = self._trace.creator
        visited: set[Any] = set()
        pending = [root.grad_fn for root in roots if root.grad_fn is not None]
        while pending and len(self._handles) < MAX_NODES:
            node = pending.pop()
            if node in visited:
                continue
            visited.add(node)
            number = node_sequence_nr(node)
            if number >= _FIRST_LEAF or number < first_node:
                continue
            self._handles.append(node.register_prehook(self._hook_for(creator(number))))
            pending += [previous for previous, _ in node.next_functions if previous is not None]
        self.is_complete = self.is_complete and not pending

    def _install_on_recomputed(self, output: Any, first_node: int) -> None:
        """Reentrant checkpointing runs a backward of its own on what it recomputed; the other kind needs only the saved values."""
        if torch.is_grad_enabled() and not has_saved_tensor_hooks(ignore_tracing=False):
            self.install((tensor for _, tensor in find_tensors(output)), first_node)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks.clear()

    def _hook_for(self, creator: LayerCall) -> Callable[[Any], None]:
        if id(creator) not in self._hooks:
            trace = self._trace
            append, read, set_back = trace.marks.append, trace.read, trace.set_back

            def hook(gradients: Any) -> None:
                if not torch.compiler.is_compiling() and trace.thread:
                    now = read()
                    append((now, creator))
                    if set_back is not None:
                        set_back(now)

            self._hooks[id(creator)] = hook
        return self._hooks[id(creator)]
