"""What refers to what, climbing from some objects up to the variables of the program.

One pass over Python's objects finds everything that refers to a whole level, for all objects that are asked about at once: a climb
costs as many passes as the longest chain has links. It is bounded in objects, levels and time, and runs none of the user's code.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Sequence
from types import AsyncGeneratorType, CoroutineType, GeneratorType, ModuleType
from typing import Any

from sonde.leaks.live_frames import is_ours, running, running_locals
from sonde.leaks.live_graphs import is_node
from sonde.leaks.reference_path import in_frame, is_a, key_of

MAX_OBJECTS = 20_000
MAX_LEVELS = 24
MAX_S = 3.0

Path = list[Any]  # objects from the one that a variable holds down to the one that was asked about


class Climb:
    """A climb from `targets`. `paths(i)` gives the ways to the i-th, the shortest first, each with the name of its variable."""

    def __init__(self, targets: Sequence[Any], max_paths: int) -> None:
        self._variables = running_locals()
        self._modules = _module_dicts()
        self._objects: list[Any] = []
        self._above: list[list[int]] = []  # who refers to it
        self._below: list[list[int]] = []
        self._roots: list[list[str]] = []  # names of variables that hold it
        self._known: dict[int, int] = {}
        self._own = {id(self._objects), id(targets)}
        self._num_targets, self._max_paths = len(targets), max_paths
        self._climb([self._add(target) for target in targets])

    def paths(self, target: int) -> list[tuple[Path, str]]:
        found = [(self._down(came_from, top), root) for top, came_from in self._upward(target) for root in self._roots[top]]
        if not found:  # what no variable holds: made in C, or higher than we climb
            found = [
                (self._down(came_from, top), f"a {type(self._objects[top]).__name__}")
                for top, came_from in self._upward(target)
                if not self._above[top] and top != target
            ]
        return found[: self._max_paths]

    def _add(self, thing: Any) -> int:
        self._known[id(thing)] = len(self._objects)
        self._objects.append(thing)
        self._above.append([])
        self._below.append([])
        self._roots.append(list(self._variables.get(id(thing), ())))
        return len(self._objects) - 1

    def _climb(self, level: list[int]) -> None:
        deadline = time.monotonic() + MAX_S
        for _ in range(MAX_LEVELS):
            if not level or len(self._objects) > MAX_OBJECTS or time.monotonic() > deadline or self._is_enough():
                return
            level = self._next_level(level)

    def _is_enough(self) -> bool:
        return all(sum(len(self._roots[top]) for top, _ in self._upward(i)) >= self._max_paths for i in range(self._num_targets))

    def _next_level(self, level: list[int]) -> list[int]:
        asked = [self._objects[index] for index in level]
        frontier = dict(zip(map(id, asked), level))
        referrers = gc.get_referrers(*asked)
        own = self._own | {id(asked), id(referrers)}
        reached = []
        for holder in referrers:
            if id(holder) in own or (is_a(holder, GeneratorType) and is_ours(holder.gi_code)):
                continue
            below = {frontier[id(item)] for item in gc.get_referents(holder) if id(item) in frontier}
            if not below or self._is_root(holder, below):
                continue
            index = self._known.get(id(holder), -1)
            if index < 0:
                index = self._add(holder)
                reached.append(index)
            for child in below:
                self._above[child].append(index)
                self._below[index].append(child)
        return reached

    def _is_root(self, holder: Any, below: set[int]) -> bool:
        """Whether nobody needs to look behind this holder; then what it calls its children is noted."""
        if is_a(holder, type):
            for namespace in below:
                for child in self._below[namespace] if is_a(self._objects[namespace], dict) else ():
                    key = key_of(self._objects[namespace], self._objects[child])
                    self._roots[child].append(f"class {holder.__name__} attribute {key}")
            return True
        module = self._modules.get(id(holder))
        for child in below:
            thing = self._objects[child]
            if module is not None:
                self._roots[child].extend(f"{module} global '{key}'" for key, value in holder.items() if value is thing)
            elif is_a(holder, GeneratorType):
                self._roots[child].append(in_frame(holder, thing))
            elif is_a(holder, (CoroutineType, AsyncGeneratorType)):
                self._roots[child].append(f"coroutine {holder.__qualname__}()")
            elif is_node(holder):
                self._roots[child].append(f"autograd graph {type(holder).__name__}")
            else:
                return False
        return True

    def _upward(self, start: int) -> Iterator[tuple[int, dict[int, int]]]:
        """Everything above an object, the nearest first, and by which way it was reached."""
        came_from = {start: -1}
        level = [start]
        while level:
            for index in level:
                yield index, came_from
            above = []
            for index in level:
                for holder in self._above[index]:
                    if holder not in came_from:
                        came_from[holder] = index
                        above.append(holder)
            level = above

    def _down(self, came_from: dict[int, int], index: int) -> Path:
        path = []
        while index >= 0:
            path.append(self._objects[index])
            index = came_from[index]
        return path


def _module_dicts() -> dict[int, str]:
    """By id, the global variables of every module, and of scripts that run without being one."""
    found: dict[int, str] = {}
    for name, module in list(sys.modules.items()):  # another thread may import meanwhile
        if is_a(module, ModuleType):
            found.setdefault(id(object.__getattribute__(module, "__dict__")), name)
    for frame in running():
        found.setdefault(id(frame.f_globals), str(frame.f_globals.get("__name__", "script")))
    return found
