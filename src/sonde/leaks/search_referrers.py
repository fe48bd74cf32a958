"""Searches from objects up through their referrers to the variables of the program.

One pass over Python's objects (`gc.get_referrers`) finds the referrers of a whole level, for all targets at once: a search takes as many
passes as the longest chain has links. It is limited in objects, levels and time, and runs none of the user's code.
"""

import gc
import sys
import time
from collections.abc import Iterator, Sequence
from types import AsyncGeneratorType, CoroutineType, GeneratorType, ModuleType
from typing import Any

from sonde.leaks.autograd_graphs_alive import is_autograd_node
from sonde.leaks.describe_reference import describe_frame_variable, is_a, key_of
from sonde.leaks.local_variables import is_sonde_code, running_locals, user_frames

MAX_OBJECTS = 20_000
MAX_LEVELS = 24
MAX_SECONDS = 3.0

ObjectPath = list[Any]  # objects from the one that a variable refers to down to the target


class ReferrerSearch:
    """Finds the paths from variables to each of `targets`; `paths(i)` returns those of the i-th target."""

    def __init__(self, targets: Sequence[Any], max_paths: int) -> None:
        self._variables = running_locals()
        self._modules = _module_dicts()
        self._objects: list[Any] = []
        self._referrers: list[list[int]] = []  # by index of an object, the indices of its referrers
        self._referents: list[list[int]] = []
        self._roots: list[list[str]] = []  # by index of an object, the names of the variables that refer to it
        self._index: dict[int, int] = {}  # by id of an object
        self._own = {id(self._objects), id(targets)}  # containers of this search are no referrers
        self._num_targets, self._max_paths = len(targets), max_paths
        self._search([self._add(target) for target in targets])

    def paths(self, target: int) -> list[tuple[ObjectPath, str]]:
        """The paths to a target, shortest first, each with the name of its variable. If no variable leads to it, the paths from the topmost
        objects, each with the type of that object."""
        found = [(self._path(came_from, top), root) for top, came_from in self._ancestors(target) for root in self._roots[top]]
        if not found:  # an object implemented in C refers to it, or the chain is longer than MAX_LEVELS
            found = [
                (self._path(came_from, top), f"a {type(self._objects[top]).__name__}")
                for top, came_from in self._ancestors(target)
                if not self._referrers[top] and top != target
            ]
        return found[: self._max_paths]

    def _add(self, thing: Any) -> int:
        self._index[id(thing)] = len(self._objects)
        self._objects.append(thing)
        self._referrers.append([])
        self._referents.append([])
        self._roots.append(list(self._variables.get(id(thing), ())))
        return len(self._objects) - 1

    def _search(self, level: list[int]) -> None:
        deadline = time.monotonic() + MAX_SECONDS
        for _ in range(MAX_LEVELS):
            if not level or len(self._objects) > MAX_OBJECTS or time.monotonic() > deadline or self._has_enough_paths():
                return
            level = self._next_level(level)

    def _has_enough_paths(self) -> bool:
        return all(sum(len(self._roots[top]) for top, _ in self._ancestors(i)) >= self._max_paths for i in range(self._num_targets))

    def _next_level(self, level: list[int]) -> list[int]:
        """Add the referrers of a level of objects; returns the indices of those that are new."""
        asked = [self._objects[index] for index in level]
        frontier = dict(zip(map(id, asked), level))
        referrers = gc.get_referrers(*asked)
        own = self._own | {id(asked), id(referrers)}
        added = []
        for referrer in referrers:
            if id(referrer) in own or (is_a(referrer, GeneratorType) and is_sonde_code(referrer.gi_code)):
                continue
            children = {frontier[id(item)] for item in gc.get_referents(referrer) if id(item) in frontier}
            if not children or self._add_root(referrer, children):
                continue
            index = self._index.get(id(referrer), -1)
            if index < 0:
                index = self._add(referrer)
                added.append(index)
            for child in children:
                self._referrers[child].append(index)
                self._referents[index].append(child)
        return added

    def _add_root(self, referrer: Any, children: set[int]) -> bool:
        """If the search can end at this referrer (a module, a class, a generator …), store its names for the children; else False."""
        if is_a(referrer, type):
            for namespace in children:
                for child in self._referents[namespace] if is_a(self._objects[namespace], dict) else ():
                    key = key_of(self._objects[namespace], self._objects[child])
                    self._roots[child].append(f"class {referrer.__name__} attribute {key}")
            return True
        module = self._modules.get(id(referrer))
        for child in children:
            thing = self._objects[child]
            if module is not None:
                self._roots[child].extend(f"{module} global '{key}'" for key, value in referrer.items() if value is thing)
            elif is_a(referrer, GeneratorType):
                self._roots[child].append(describe_frame_variable(referrer, thing))
            elif is_a(referrer, (CoroutineType, AsyncGeneratorType)):
                self._roots[child].append(f"coroutine {referrer.__qualname__}()")
            elif is_autograd_node(referrer):
                self._roots[child].append(f"autograd graph {type(referrer).__name__}")
            else:
                return False
        return True

    def _ancestors(self, start: int) -> Iterator[tuple[int, dict[int, int]]]:
        """Every object above `start`, nearest first, with a dict that leads back: the object below each one."""
        came_from = {start: -1}
        level = [start]
        while level:
            for index in level:
                yield index, came_from
            above = []
            for index in level:
                for referrer in self._referrers[index]:
                    if referrer not in came_from:
                        came_from[referrer] = index
                        above.append(referrer)
            level = above

    def _path(self, came_from: dict[int, int], index: int) -> ObjectPath:
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
    for frame in user_frames():
        found.setdefault(id(frame.f_globals), str(frame.f_globals.get("__name__", "script")))
    return found
