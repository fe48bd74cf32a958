"""Describes a DataLoader when its iteration starts: its settings, its order, and whether its workers draw the same random numbers.

A worker gets a copy of the dataset and of all modules, including their random generators, so all workers draw the same numbers. (torch
seeds the global generators differently in each worker, unless `worker_init_fn` seeds them alike.) The use of generators is read from the
code that loads a sample; it is not run.
"""

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

from sonde.capture.user_source_line import is_library

MAX_OBJECTS = 64  # inspected per dataset: transforms may be nested
MAX_FUNCTIONS = 64  # per object
MAX_DEPTH = 3
_ENTRIES = ("__getitem__", "__getitems__", "__iter__", "__call__", "forward")  # methods that a worker calls
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_BY_WORKER = frozenset({"get_worker_info", "initial_seed", "worker_info", "getpid", "SeedSequence", "urandom", "time", "time_ns"})
_DIVIDES = frozenset({"get_worker_info", "worker_info"})
_SEEDS = frozenset({"seed", "manual_seed", "default_rng", "RandomState", "Random", "set_state"})
_SEEDED_BY_TORCH = (np.random.mtrand._rand, torch.default_generator)  # global generators
_NUMPY = frozenset({"np", "numpy"})
_TORCH_DRAWS = frozenset({"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "bernoulli", "normal", "multinomial"})


def describe_loader(loader: Any) -> dict[str, Any]:
    """Fields of a `CallSiteFound` event. Fields that cannot be read are omitted: subclasses of the user may behave in any way."""
    fields: dict[str, Any] = {}
    for describe in (_settings, _order, _randomness):
        with contextlib.suppress(Exception):
            fields |= describe(loader)
    return fields


def _settings(loader: Any) -> dict[str, Any]:
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
    has_own_seed = _has_own_seed(init)
    return {
        "copied_generators": [place for part in parts for place in part.generators if not has_own_seed(place)],
        "copied_globals": sorted({name for part in parts for name in part.globals if not has_own_seed(name)}),
        "seeded_alike": sorted(_seeded_alike(init) & _draws(names)),
        "is_worker_aware": bool(names & _DIVIDES) or has_own_seed("dataset"),
    }


class _WorkerCode(NamedTuple):
    """Names in the code of one object that runs in a worker, and the generators that this code uses."""

    names: set[str]
    generators: list[str]
    globals: set[str]  # names of generators in a module or an enclosing function


def _parts(loader: Any) -> Iterator[_WorkerCode]:
    queue: list[tuple[str, Any, int]] = [("", loader.dataset, 0), ("collate_fn", getattr(loader, "collate_fn", None), 0)]
    visited: set[int] = set()
    while queue and len(visited) < MAX_OBJECTS:
        path, holder, depth = queue.pop(0)
        while isinstance(holder, partial):
            holder = holder.func
        if id(holder) in visited:
            continue
        visited.add(id(holder))
        part = _read(holder)
        yield part
        if part.names & (_BY_WORKER | _SEEDS):  # it reads its worker id, or seeds its generators itself, for instance per sample
            part.globals.clear()
            continue
        for name, value in _held(holder, part.names):
            full_path = f"{path}.{name}" if path else name
            if isinstance(value, _GENERATORS):
                part.generators.append(full_path)
            elif depth < MAX_DEPTH:
                queue.append((full_path, value, depth + 1))


def _held(holder: Any, names: set[str]) -> Iterator[tuple[str, Any]]:
    """Attributes with these names that are generators or may contain one, including items of lists of transforms."""
    for name in sorted(names & getattr(holder, "__dict__", {}).keys()):
        value = vars(holder)[name]
        if isinstance(value, _GENERATORS) or _may_hold(value):
            yield name, value
        elif isinstance(value, (list, tuple)) and len(value) <= MAX_OBJECTS:
            yield from ((f"{name}.{i}", item) for i, item in enumerate(value) if _may_hold(item))


def _may_hold(value: Any) -> bool:
    """Whether a value may contain a generator: not a tensor, array, number or text; a function may use one of its module."""
    return hasattr(value, "__dict__") and not isinstance(value, (torch.Tensor, np.ndarray, type, MethodType))


def _read(holder: Any) -> _WorkerCode:
    """The code that loads a sample: methods or a function of the user, and the functions of the user that they call."""
    part = _WorkerCode(set(), [], set())
    kind = type(holder)
    waiting = [method for name in _ENTRIES if isinstance(method := getattr(kind, name, None), FunctionType)]
    if isinstance(holder, FunctionType) and not is_library(holder.__code__.co_filename):
        waiting.append(holder)
    done: set[FunctionType] = set()
    while waiting and len(done) < MAX_FUNCTIONS:
        if (function := waiting.pop()) in done:
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
    """Generators that a function reads from its module or an enclosing function; a worker copies these too."""
    around = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    for name in _loaded(function.__code__):
        value = function.__globals__.get(name)
        with contextlib.suppress(ValueError):  # an empty cell
            value = around[name].cell_contents if name in around else value
        if isinstance(value, _GENERATORS) and not any(value is each for each in _SEEDED_BY_TORCH):
            yield name


def _loaded(code: CodeType) -> Iterator[str]:
    """Global and enclosing names that a function reads; `co_names` would include attributes."""
    yield from (str(one.argval) for one in get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _loaded(constant)


def _has_own_seed(init: Callable[[int], Any] | None) -> Callable[[str], bool]:
    """A predicate: whether `worker_init_fn` handles a generator, or the dataset. Seeding only global generators does not count."""
    if init is None:
        return lambda path: False
    code = getattr(init, "__code__", None)
    names = set(_names_in(code)) if isinstance(code, CodeType) else None
    return lambda path: names is None or bool(names & {"get_worker_info", "dataset", path.rpartition(".")[2]})


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _seeded_alike(init: Callable[[int], Any] | None) -> set[str]:
    """The global generators that `worker_init_fn` seeds with the same value in every worker, because it reads nothing that differs."""
    code = getattr(init, "__code__", None)
    if not isinstance(code, CodeType) or code.co_argcount != 1:
        return set()
    names = set(_names_in(code))
    argument, reads = code.co_varnames[0], (one for one in get_instructions(code) if one.opname.startswith("LOAD_FAST"))
    if names & _BY_WORKER or argument in code.co_cellvars or any(argument in str(one.argrepr) for one in reads):
        return set()
    return {library for library, is_seeded in (
        ("numpy", "seed" in names and names & _NUMPY), ("torch", "manual_seed" in names),
        ("random", "seed" in names and "random" in names and not names & _NUMPY),
    ) if is_seeded}  # fmt: skip


def _draws(names: set[str]) -> set[str]:
    """The global generators that code with these names probably uses."""
    return {library for library, draws in (
        ("numpy", "random" in names and names & _NUMPY), ("torch", "torch" in names and names & _TORCH_DRAWS),
        ("random", "random" in names and not names & _NUMPY),
    ) if draws}  # fmt: skip
