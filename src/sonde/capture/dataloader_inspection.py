"""What a DataLoader says of itself when it is started: how it loads, in which order, and whether its workers draw the same random numbers.

A worker gets a copy of the dataset and of all modules, and with it of any random generator in them: every worker then draws the same
numbers, and workers that are started again draw them again. (The global generators of torch, random and numpy are seeded differently in
each, by torch; unless the user's `worker_init_fn` seeds them alike.) Whether that matters is read from the code that runs when a sample is
asked for; nothing of it is run.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dis import get_instructions
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from sonde.capture.call_site import is_library

MAX_OBJECTS = 64  # looked at in a dataset: transforms of transforms
MAX_FUNCTIONS = 64  # of one object
MAX_DEPTH = 3
_ENTRIES = ("__getitem__", "__getitems__", "__iter__", "__call__", "forward")  # through which a worker comes
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_BY_WORKER = frozenset({"get_worker_info", "initial_seed", "worker_info", "getpid", "SeedSequence", "urandom", "time", "time_ns"})
_DIVIDES = frozenset({"get_worker_info", "worker_info"})
_SEEDS = frozenset({"seed", "manual_seed", "default_rng", "RandomState", "Random", "set_state"})
_SEEDED_BY_TORCH = (np.random.mtrand._rand, torch.default_generator)  # the global ones, differently in each worker
_NUMPY = frozenset({"np", "numpy"})
_TORCH_DRAWS = frozenset({"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "bernoulli", "normal", "multinomial"})


def describe_loader(loader: Any) -> dict[str, Any]:
    """Fields of a `CallSiteFound` event. What a loader lacks, or fails to answer, is left out: a class of the user's may do anything."""
    facts: dict[str, Any] = {}
    for describe in (_how_it_loads, _order, _randomness):
        with contextlib.suppress(Exception):
            facts |= describe(loader)
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
    parts = list(_parts(loader))
    names = set().union(*(part.names for part in parts))
    told_apart = _told_apart(init)
    return {
        "copied_generators": [place for part in parts for place in part.generators if not told_apart(place)],
        "copied_globals": sorted({name for part in parts for name in part.globals if not told_apart(name)}),
        "seeded_alike": sorted(_seeded_alike(init) & _draws(names)),
        "is_worker_aware": bool(names & _DIVIDES) or told_apart("dataset"),
    }


class _Part(NamedTuple):
    """Of a loader, a dataset, or what that holds: names in the code that runs in a worker, and the generators that this code draws from."""

    names: set[str]
    generators: list[str]
    globals: set[str]  # generators too, but of a module or of a function around this one


def _parts(loader: Any) -> Iterator[_Part]:
    queue: list[tuple[str, Any, int]] = [("", loader.dataset, 0), ("collate_fn", getattr(loader, "collate_fn", None), 0)]
    seen: set[int] = set()
    while queue and len(seen) < MAX_OBJECTS:
        path, holder, depth = queue.pop(0)
        while isinstance(holder, partial):
            holder = holder.func
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        part = _read(holder)
        if part.names & (_BY_WORKER | _SEEDS):
            part.globals.clear()
            yield part
            continue  # it knows in which worker it is, or seeds what it holds itself, by the sample for instance
        yield part
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
    """No tensor, array, number or text; a function may draw from a generator of its module."""
    return hasattr(value, "__dict__") and not isinstance(value, (torch.Tensor, np.ndarray, type, MethodType))


def _read(holder: Any) -> _Part:
    """The code that runs when a sample is asked for: methods or a function of the user's, and what of the user's they call."""
    part = _Part(set(), [], set())
    kind = type(holder)
    waiting = [method for name in _ENTRIES if isinstance(method := getattr(kind, name, None), FunctionType)]
    if isinstance(holder, FunctionType) and not is_library(holder.__code__.co_filename):
        waiting.append(holder)
    done: set[FunctionType] = set()
    while waiting and len(done) < MAX_FUNCTIONS:
        function = waiting.pop()
        if function in done:
            continue
        done.add(function)
        new = set(_names_in(function.__code__))
        part.names.update(new)
        if not is_library(function.__code__.co_filename):
            part.globals.update(_from_outside(function))
        for name in new:
            called = getattr(kind, name, None) or function.__globals__.get(name)
            if isinstance(called, FunctionType) and (hasattr(kind, name) or not is_library(called.__code__.co_filename)):
                waiting.append(called)
    return part


def _from_outside(function: FunctionType) -> Iterator[str]:
    """Generators that a function finds in its module, or in the function that it was made in: copied with everything else, too."""
    around = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    for name in _loaded(function.__code__):
        value = function.__globals__.get(name)
        with contextlib.suppress(ValueError):  # a cell that nothing was put into yet
            value = around[name].cell_contents if name in around else value
        if isinstance(value, _GENERATORS) and not any(value is each for each in _SEEDED_BY_TORCH):
            yield name


def _loaded(code: CodeType) -> Iterator[str]:
    """Names that are looked up outside of a function: not those of attributes, which look the same in `co_names`."""
    yield from (str(one.argval) for one in get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _loaded(constant)


def _told_apart(init: Callable[[int], Any] | None) -> Callable[[str], bool]:
    """Does this `worker_init_fn` take care of a generator, or of the dataset? One that only seeds global generators does not."""
    if init is None:
        return lambda place: False
    code = getattr(init, "__code__", None)
    names = set(_names_in(code)) if isinstance(code, CodeType) else None
    return lambda place: names is None or bool(names & {"get_worker_info", "dataset", place.rpartition(".")[2]})


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
