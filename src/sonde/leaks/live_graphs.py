"""The tensors that are alive, and the autograd graphs that they keep: how large these are, and which tensor is their root.

A graph is walked by its nodes alone. What the nodes have saved is not touched: reading it may recompute a checkpoint.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

MAX_NODES = 50_000  # about 50 ms; the graphs of large models have 20,000


def live_tensors(generation: int | None = None) -> list[Tensor]:
    """Every tensor that Python knows, also those that only an autograd graph still holds; or those of one generation of the collector."""
    objects = gc.get_objects(generation)
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor)}
    return [item for item in objects if type(item) in kinds]


def use_count(tensor: Tensor) -> int:
    """How many hold the tensor below Python, Python itself being one; 0 where torch does not say."""
    count = getattr(tensor, "_use_count", None)
    return int(count()) if callable(count) else 0


def is_node(holder: Any) -> bool:
    return issubclass(type(holder), torch.autograd.graph.Node)


def with_graph(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those that are results of a recorded operation, the latest first: a root comes before whatever is below it."""
    found: list[tuple[int, int, Tensor]] = []
    for tensor in tensors:
        try:
            node = tensor.grad_fn
            if node is not None:
                found.append((node._sequence_nr() if hasattr(node, "_sequence_nr") else 0, len(found), tensor))
        except Exception:  # a stranger's tensor, or a view that was changed in a way that autograd refuses
            continue
    return [tensor for _, _, tensor in sorted(found, key=lambda one: one[:2], reverse=True)]


def largest(tensors: Iterable[Tensor], *, limit: int = MAX_NODES) -> tuple[int, Tensor | None]:
    """The tensor whose graph has the most nodes, and their number (at most about `limit` nodes are looked at in all)."""
    seen: set[Any] = set()
    most, root = 0, None
    for tensor in with_graph(tensors):
        before = len(seen)
        _walk(tensor.grad_fn, seen, limit)
        if len(seen) - before > most:
            most, root = len(seen) - before, tensor
        if len(seen) >= limit:
            break
    return most, root


def root_holding(tensor: Tensor) -> Tensor | None:
    """The latest tensor whose graph keeps this one alive; None where none is known."""
    if use_count(tensor) == 1:
        return None  # nothing below Python holds it
    candidates = [other for other in with_graph(live_tensors()) if other is not tensor]
    mine = tensor.grad_fn
    if mine is None:  # an input: which node has saved it cannot be asked, so the largest graph is named
        return largest(candidates)[1]
    seen: set[Any] = set()
    for candidate in candidates:
        _walk(candidate.grad_fn, seen, MAX_NODES)
        if mine in seen:
            return candidate
    return None


def _walk(start: Any, seen: set[Any], limit: int) -> None:
    todo = [start]
    while todo and len(seen) < limit:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo.extend(below for below, _ in node.next_functions)
