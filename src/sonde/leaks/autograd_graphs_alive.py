"""The tensors that are alive and the autograd graphs that they keep: the size of a graph, and the tensor at its root.

Graphs are traversed by their nodes alone. Saved tensors are not read: reading one may recompute a checkpoint.
"""

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from sonde.statistics.private_torch_api import node_sequence_nr, use_count

MAX_NODES = 50_000  # about 50 ms; the graphs of large models have 20,000


def live_tensors(generation: int | None = None) -> list[Tensor]:
    """Every tensor that Python's collector knows, also if only an autograd graph holds it; or those of one generation."""
    objects = gc.get_objects(generation)
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor)}
    return [item for item in objects if type(item) in kinds]


def is_autograd_node(thing: Any) -> bool:
    return issubclass(type(thing), torch.autograd.graph.Node)


def with_graph(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that have a `grad_fn`, latest first, so that a root comes before the tensors that it was computed from."""
    found: list[tuple[int, int, Tensor]] = []
    for tensor in tensors:
        try:
            node = tensor.grad_fn
            if node is not None:
                found.append((node_sequence_nr(node), len(found), tensor))
        except Exception:  # a tensor subclass of the user, or a view that was modified in a way that autograd refuses
            continue
    return [tensor for _, _, tensor in sorted(found, key=lambda entry: entry[:2], reverse=True)]


def largest_graph(tensors: Iterable[Tensor], *, limit: int = MAX_NODES) -> tuple[int, Tensor | None]:
    """The number of nodes of the largest graph, and the tensor at its root. At most about `limit` nodes are visited in all."""
    visited: set[Any] = set()
    most, root = 0, None
    for tensor in with_graph(tensors):
        num = sum(1 for _ in graph_nodes(tensor.grad_fn, limit, visited))
        if num > most:
            most, root = num, tensor
        if len(visited) >= limit:
            break
    return most, root


def root_holding(tensor: Tensor) -> Tensor | None:
    """The latest tensor whose graph keeps this one alive; None if none is known."""
    if use_count(tensor) == 1:
        return None  # no C++ object refers to it
    candidates = [other for other in with_graph(live_tensors()) if other is not tensor]
    node = tensor.grad_fn
    if node is None:  # an input: torch does not report which node saved it, so take the largest graph
        return largest_graph(candidates)[1]
    visited: set[Any] = set()
    return next((other for other in candidates if node in graph_nodes(other.grad_fn, MAX_NODES, visited)), None)


def graph_nodes(start: Any, limit: float, visited: set[Any] | None = None) -> Iterator[Any]:
    """The nodes of the graph below `start` that are not in `visited`, until it holds `limit` nodes; they are added to it."""
    visited = set() if visited is None else visited
    pending = [start]
    while pending and len(visited) < limit:
        node = pending.pop()
        if node is not None and node not in visited:
            visited.add(node)
            yield node
            pending.extend(below for below, _ in node.next_functions)
