"""Who keeps a tensor alive: the chain of objects from a variable of the program down to it.

One pass over the heap finds everything that refers to a whole level of objects, so a chain costs as many passes as it has links.
The walk is bounded in objects and in time. Nothing is kept alive by it, and none of the user's code runs.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import AsyncGeneratorType, CoroutineType, GeneratorType, ModuleType
from typing import Any

from torch import Tensor

from sonde.forensics.frames import is_ours, running, running_locals
from sonde.forensics.graphs import is_node, root_holding
from sonde.forensics.links import in_frame, key_of, words

MAX_OBJECTS = 20_000
MAX_DEPTH = 24
MAX_S = 3.0


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
    return [chain for chain, _ in traced(tensor, name=name, max_chains=max_chains)]


def traced(tensor: Tensor, *, name: str = "", max_chains: int = 3) -> list[tuple[Chain, list[Any]]]:
    """As `holders`, with the objects of each chain, from the variable's own down to the tensor (of a graph: to its root)."""
    label = name or _label(tensor)
    paths = _paths(tensor, max_chains)
    if paths:
        found = [(_chain(path, root, label), path) for path, root in paths]
        return list({str(chain): (chain, path) for chain, path in found}.values())
    holder = root_holding(tensor)
    if holder is None:
        return []
    graph = f"{type(holder.grad_fn).__name__} graph"
    above = [(_chain(path, root, graph), path) for path, root in _paths(holder, max_chains)]
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


def _chain(path: Sequence[Any], root: str, label: str) -> Chain:
    return Chain((*words(path, root), label), any(map(_throws_out, path)))


def _throws_out(holder: Any) -> bool:
    if isinstance(holder, deque):
        return holder.maxlen is not None
    return isinstance(holder, functools._lru_cache_wrapper) and holder.cache_info().maxsize is not None


def _paths(target: Any, max_paths: int) -> list[tuple[list[Any], str]]:
    """Objects from a root down to the target, and what the root is called; nearest roots first."""
    deadline = time.monotonic() + MAX_S
    variables = running_locals()
    modules = _module_dicts()
    objects: list[Any] = [target]  # everything that was reached; `below` says what it was reached from
    below: list[int] = [-1]
    known = {id(target): 0}
    found: list[tuple[list[Any], str]] = []
    tops: list[int] = []

    def down(index: int) -> list[Any]:
        path = []
        while index >= 0:
            path.append(objects[index])
            index = below[index]
        return path

    def name_roots(index: int) -> None:
        found.extend((down(index), root) for root in variables.get(id(objects[index]), ()))

    name_roots(0)
    level = [0]
    for _ in range(MAX_DEPTH):
        if len(found) >= max_paths or not level or len(objects) > MAX_OBJECTS or time.monotonic() > deadline:
            break
        frontier = {id(objects[index]): index for index in level}
        frontier_objects = [objects[index] for index in level]
        referrers = gc.get_referrers(*frontier_objects)
        own = {id(objects), id(frontier_objects), id(referrers)}
        reached: set[int] = set()
        next_level: list[int] = []
        for holder in referrers:
            if id(holder) in own or id(holder) in known or (isinstance(holder, GeneratorType) and is_ours(holder.gi_code)):
                continue
            child = next((frontier[id(item)] for item in gc.get_referents(holder) if id(item) in frontier), None)
            if child is None:
                continue
            reached.add(child)
            if id(holder) in modules:
                names = (key for key, value in holder.items() if value is objects[child])
                found.extend((down(child), f"{modules[id(holder)]} global '{key}'") for key in names)
                continue
            if isinstance(holder, type):
                if below[child] >= 0 and isinstance(objects[child], dict):  # the namespace of the class
                    key = key_of(objects[child], objects[below[child]])
                    found.append((down(below[child]), f"class {holder.__name__} attribute {key}"))
                continue
            root = _root(holder, objects[child])
            if root:
                found.append((down(child), root))
                continue
            index = len(objects)
            objects.append(holder)
            below.append(child)
            known[id(holder)] = index
            name_roots(index)
            next_level.append(index)
        tops.extend(index for index in level if index not in reached and index)
        del holder, referrers, frontier_objects
        level = next_level
    if not found:  # what no variable holds: made in C, or deeper than we look
        found = [(down(index), f"a {type(objects[index]).__name__}") for index in tops]
    return found[:max_paths]


def _root(holder: Any, child: Any) -> str:
    """What an object is called that nobody needs to look behind."""
    if isinstance(holder, GeneratorType):
        return in_frame(holder, child)
    if isinstance(holder, (CoroutineType, AsyncGeneratorType)):
        return f"coroutine {holder.__qualname__}()"
    return f"autograd graph {type(holder).__name__}" if is_node(holder) else ""


def _module_dicts() -> dict[int, str]:
    """By id, the global variables of every module, and of scripts that run without being one."""
    found: dict[int, str] = {}
    for name, module in list(sys.modules.items()):  # another thread may import meanwhile
        if isinstance(module, ModuleType):
            found.setdefault(id(object.__getattribute__(module, "__dict__")), name)
    for frame in running():
        found.setdefault(id(frame.f_globals), str(frame.f_globals.get("__name__", "script")))
    return found
