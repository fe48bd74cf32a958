"""What a DataLoader says of itself when it is started: how it loads, in which order, and whether its workers draw the same random numbers.

A worker gets a copy of the dataset, and with it of any random generator that the dataset holds: every worker then draws the same
numbers, and workers that are started again draw them again. (The global generators of torch, random and numpy are seeded differently in
each, by torch; unless the user's `worker_init_fn` seeds them alike.) Whether that matters is read from the code that runs when a sample is
asked for; nothing of it is run.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dis import get_instructions
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from sonde.capture.source import is_library

MAX_OBJECTS = 64  # looked at in a dataset: transforms of transforms
MAX_FUNCTIONS = 64  # of one object
MAX_DEPTH = 3
_ENTRIES = ("__getitem__", "__getitems__", "__iter__", "__call__", "forward")  # through which a worker comes
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_BY_WORKER = frozenset({"get_worker_info", "initial_seed", "worker_info", "getpid", "SeedSequence", "urandom", "time", "time_ns"})
_SEEDS = frozenset({"seed", "manual_seed", "default_rng", "RandomState", "Random", "set_state"})
_NUMPY = frozenset({"np", "numpy"})
_TORCH_DRAWS = frozenset({"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "bernoulli", "normal", "multinomial"})


def about(loader: Any) -> dict[str, Any]:
    """The data of its `source` event. What a loader does not have, or fails to say, is left out: a stranger's class may do anything."""
    facts: dict[str, Any] = {}
    for tell in (_how_it_loads, _order, _randomness):
        with contextlib.suppress(Exception):
            facts |= tell(loader)
    return facts


def _how_it_loads(loader: Any) -> dict[str, Any]:
    return {
        "num_workers": int(getattr(loader, "num_workers", 0)), "batch_size": int(getattr(loader, "batch_size", None) or 0),
        "pin_memory": bool(getattr(loader, "pin_memory", False)), "persistent_workers": bool(getattr(loader, "persistent_workers", False)),
        "dataset": type(getattr(loader, "dataset", None)).__name__,
    }  # fmt: skip


def _order(loader: Any) -> dict[str, Any]:
    if isinstance(loader.dataset, IterableDataset):
        return {"order": "stream"}
    kind = type(getattr(loader.batch_sampler, "sampler", None))
    order = "random" if kind is RandomSampler else "sequential" if kind is SequentialSampler else "other"
    return {"order": order, "num_batches": len(loader)}


def _randomness(loader: Any) -> dict[str, Any]:
    if loader.num_workers < 2:
        return {}
    init = loader.worker_init_fn
    parts = list(_parts(loader.dataset))
    names = set().union(*(part.names for part in parts))
    return {
        "copied_generators": [place for part in parts for place in part.generators] if init is None else [],
        "seeded_alike": sorted(_seeded_alike(init) & _draws(names)),
        "knows_worker": bool(names & _BY_WORKER) or init is not None,
    }


class _Part(NamedTuple):
    """Of a dataset, or itself: names in the code that runs in a worker, and the generators that this code draws from."""

    names: set[str]
    generators: list[str]


def _parts(dataset: Any) -> Iterator[_Part]:
    queue: list[tuple[str, Any, int]] = [("", dataset, 0)]
    seen: set[int] = set()
    while queue and len(seen) < MAX_OBJECTS:
        path, holder, depth = queue.pop(0)
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        part = _Part(_names_used(type(holder)), [])
        yield part
        if part.names & (_BY_WORKER | _SEEDS):
            continue  # it knows in which worker it is, or seeds what it holds itself, by the sample for instance
        for name, value in _held(holder, part.names):
            place = f"{path}.{name}" if path else name
            if isinstance(value, _GENERATORS):
                part.generators.append(place)
            elif depth < MAX_DEPTH:
                queue.append((place, value, depth + 1))


def _held(holder: Any, names: set[str]) -> Iterator[tuple[str, Any]]:
    """Of what an object holds under these names: generators, and what may hold one, in its lists of transforms too."""
    for name in sorted(names & getattr(holder, "__dict__", {}).keys()):
        value = vars(holder)[name]
        if isinstance(value, _GENERATORS) or _may_hold(value):
            yield name, value
        elif isinstance(value, (list, tuple)) and len(value) <= MAX_OBJECTS:
            yield from ((f"{name}.{i}", item) for i, item in enumerate(value) if _may_hold(item))


def _may_hold(value: Any) -> bool:
    """No tensor, array, number, text or function."""
    return hasattr(value, "__dict__") and not isinstance(value, (torch.Tensor, np.ndarray, type, FunctionType, MethodType))


def _names_used(kind: type) -> set[str]:
    """The names in the code that runs when a sample is asked for: methods, those that they call, and functions of the user's."""
    names: set[str] = set()
    done: set[FunctionType] = set()
    waiting = [method for name in _ENTRIES if isinstance(method := getattr(kind, name, None), FunctionType)]
    while waiting and len(done) < MAX_FUNCTIONS:
        function = waiting.pop()
        if function in done:
            continue
        done.add(function)
        new = set(_names_in(function.__code__))
        names |= new
        for name in new:
            called = getattr(kind, name, None) or function.__globals__.get(name)
            if isinstance(called, FunctionType) and (hasattr(kind, name) or not is_library(called.__code__.co_filename)):
                waiting.append(called)
    return names


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _seeded_alike(init: Callable[[int], Any] | None) -> set[str]:
    """Which global generators this `worker_init_fn` seeds alike in every worker: it does not look at what tells them apart."""
    code = getattr(init, "__code__", None)
    if not isinstance(code, CodeType) or code.co_argcount != 1:
        return set()
    names = set(_names_in(code))
    if names & _BY_WORKER or _reads_argument(code):
        return set()
    return {library for library, is_seeded in (
        ("numpy", "seed" in names and names & _NUMPY), ("torch", "manual_seed" in names),
        ("random", "seed" in names and "random" in names and not names & _NUMPY),
    ) if is_seeded}  # fmt: skip


def _draws(names: set[str]) -> set[str]:
    """Which global generators code with these names draws from, as far as names tell."""
    return {library for library, draws in (
        ("numpy", "random" in names and names & _NUMPY), ("torch", "torch" in names and names & _TORCH_DRAWS),
        ("random", "random" in names and not names & _NUMPY),
    ) if draws}  # fmt: skip


def _reads_argument(code: CodeType) -> bool:
    argument = code.co_varnames[0]
    reads = (one for one in get_instructions(code) if one.opname.startswith("LOAD_FAST"))
    return argument in code.co_cellvars or any(argument in str(one.argrepr) for one in reads)
