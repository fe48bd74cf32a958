"""Who keeps a tensor alive: the chain of objects from a variable of the program down to it.

Nothing is kept alive by asking, and none of the user's code runs.
"""

from __future__ import annotations

import functools
import gc
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sonde.leaks.live_frames import running_locals
from sonde.leaks.live_graphs import root_holding
from sonde.leaks.reference_path import is_a, words
from sonde.leaks.referrers import Climb, Path


@dataclass(frozen=True, slots=True)
class Chain:
    """From a variable down to the tensor: `train() local 'history' -> list[412] -> loss`."""

    links: tuple[str, ...]
    is_bounded: bool = False  # a container on the way throws old entries out by itself: deque(maxlen=…), lru_cache(maxsize=…)
    through_graph: bool = False  # an autograd graph holds it, and the variable holds the graph

    def __str__(self) -> str:
        return " -> ".join(self.links)

    @property
    def place(self) -> str:
        """The chain without what differs from one tensor to its neighbour: indices, graphs, and the tensor itself."""
        return " -> ".join(map(_without_index, self.links[: -2 if self.through_graph else -1]))


def _without_index(link: str) -> str:
    return link.partition("[")[0] if link.endswith("]") else link


def holders(tensor: Tensor, *, name: str = "", max_chains: int = 3) -> list[Chain]:
    """The shortest chains that keep a tensor alive, at most `max_chains`; empty where no Python object and no graph holds it."""
    (found,) = traced([tensor], name=name, max_chains=max_chains)
    return [chain for chain, _ in found]


def traced(tensors: Sequence[Tensor], *, name: str = "", max_chains: int = 1) -> list[list[tuple[Chain, Path]]]:
    """For each tensor what `holders` says, with the objects of each chain down to the tensor (of a graph: to its root)."""
    climb = Climb(tensors, max_chains)
    return [
        _chains(climb.paths(i), name or _label(tensor)) or _chains_to_graph(tensor, name or _label(tensor), max_chains)
        for i, tensor in enumerate(tensors)
    ]


def _chains(paths: Sequence[tuple[Path, str]], label: str) -> list[tuple[Chain, Path]]:
    chains = [(Chain((*words(path, root), label), any(map(_throws_out, path))), path) for path, root in paths]
    return list({str(chain): (chain, path) for chain, path in chains}.values())


def _chains_to_graph(tensor: Tensor, label: str, max_chains: int) -> list[tuple[Chain, Path]]:
    root = root_holding(tensor)
    if root is None:
        return []
    above = _chains(Climb([root], max_chains).paths(0), f"{type(root.grad_fn).__name__} graph")
    return [(Chain((*chain.links, label), chain.is_bounded, through_graph=True), path) for chain, path in above]


def unheld(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those that no Python object and no variable refers to: they live in autograd graphs, or elsewhere below Python."""
    variables = running_locals()
    referrers = gc.get_referrers(*tensors) if tensors else []
    held: set[int] = set()
    for holder in referrers:
        if holder is not tensors:
            held.update(map(id, gc.get_referents(holder)))
    return [tensor for tensor in tensors if id(tensor) not in held and id(tensor) not in variables]


def _label(tensor: Tensor) -> str:
    try:
        return f"{type(tensor).__name__} {list(tensor.shape)}"
    except Exception:
        return type(tensor).__name__


def _throws_out(holder: Any) -> bool:
    if is_a(holder, deque):
        return holder.maxlen is not None
    return is_a(holder, functools._lru_cache_wrapper) and holder.cache_info().maxsize is not None
