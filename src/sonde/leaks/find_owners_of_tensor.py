"""`find_owners`: the chains of references from the variables of the program down to a tensor.

The search keeps nothing alive and runs none of the user's code.
"""

import functools
import gc
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sonde.leaks.autograd_graphs_alive import root_holding
from sonde.leaks.describe_reference import describe_path, is_a
from sonde.leaks.local_variables import running_locals
from sonde.leaks.search_referrers import ObjectPath, ReferrerSearch


@dataclass(frozen=True, slots=True)
class ReferenceChain:
    """The references from a variable down to a tensor: `train() local 'history' -> list[412] -> loss`."""

    links: tuple[str, ...]
    is_bounded: bool = False  # a container in the chain drops old entries by itself: deque(maxlen=…), lru_cache(maxsize=…)
    through_graph: bool = False  # an autograd graph holds the tensor, and the variable holds the graph

    def __str__(self) -> str:
        return " -> ".join(self.links)

    @property
    def container(self) -> str:
        """The chain without the parts that differ between tensors of one container: indices, graphs, and the tensor itself."""
        links = self.links[: -2 if self.through_graph else -1]
        return " -> ".join(link.partition("[")[0] if link.endswith("]") else link for link in links)


def find_owners(tensor: Tensor, *, name: str = "", max_chains: int = 3) -> list[ReferenceChain]:
    """The shortest reference chains that keep a tensor alive.

    Arguments:
        name: what the last link calls the tensor; its type and shape by default.
        max_chains: the largest number of chains.

    Returns an empty list if no Python object and no autograd graph holds the tensor.
    """
    (found,) = find_owner_paths([tensor], name=name, max_chains=max_chains)
    return [chain for chain, _ in found]


def find_owner_paths(tensors: Sequence[Tensor], *, name: str = "", max_chains: int = 1) -> list[list[tuple[ReferenceChain, ObjectPath]]]:
    """For each tensor the chains of `find_owners`, each with its objects down to the tensor (or to the root of the graph)."""
    search = ReferrerSearch(tensors, max_chains)
    return [
        _chains(search.paths(i), name or _label(tensor)) or _chains_through_graph(tensor, name or _label(tensor), max_chains)
        for i, tensor in enumerate(tensors)
    ]


def _chains(paths: Sequence[tuple[ObjectPath, str]], label: str) -> list[tuple[ReferenceChain, ObjectPath]]:
    chains = [(ReferenceChain((*describe_path(path, root), label), any(map(_drops_entries, path))), path) for path, root in paths]
    return list({str(chain): (chain, path) for chain, path in chains}.values())


def _chains_through_graph(tensor: Tensor, label: str, max_chains: int) -> list[tuple[ReferenceChain, ObjectPath]]:
    root = root_holding(tensor)
    if root is None:
        return []
    to_root = _chains(ReferrerSearch([root], max_chains).paths(0), f"{type(root.grad_fn).__name__} graph")
    return [(ReferenceChain((*chain.links, label), chain.is_bounded, through_graph=True), path) for chain, path in to_root]


def without_python_referrer(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that no Python object and no variable refers to: autograd graphs or other C++ objects hold them."""
    variables = running_locals()
    referrers = gc.get_referrers(*tensors) if tensors else []
    referenced = {id(item) for referrer in referrers if referrer is not tensors for item in gc.get_referents(referrer)}
    return [tensor for tensor in tensors if id(tensor) not in referenced and id(tensor) not in variables]


def _label(tensor: Tensor) -> str:
    try:
        return f"{type(tensor).__name__} {list(tensor.shape)}"
    except Exception:
        return type(tensor).__name__


def _drops_entries(holder: Any) -> bool:
    if is_a(holder, deque):
        return holder.maxlen is not None
    return is_a(holder, functools._lru_cache_wrapper) and holder.cache_info().maxsize is not None
