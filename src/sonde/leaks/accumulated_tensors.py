"""Which of the tensors that stay alive pile up in one place, and in which.

A pile has something of every stretch of the training, about as much of its second half as of its first. A full buffer has nothing
old, a cache that has stopped growing has nothing young, and what throws its oldest entry out by itself is no pile at all.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sonde.leaks.live_graphs import largest
from sonde.leaks.owners import Chain, traced
from sonde.statistics.tensor_utils import storage_bytes

MIN_GENERATIONS = 5  # steps of which something is left; fewer are no trend
EVEN = 2.5  # one half of the training leaves at most so many times more than the other; a cache that fills up leaves less and less
NUM_SAMPLES = 12  # suspects of a kind whose holder is looked for: a fraction of a second each
MIN_TOGETHER = 3
MAX_KINDS = 6
MAX_INSIDE = 200_000  # objects of a container that are looked at

Kind = tuple[str, int, bool]  # dtype, number of dimensions, whether it has a graph


@dataclass(frozen=True, slots=True)
class Suspect:
    """A tensor that is older than it should be."""

    ref: weakref.ref[Tensor]
    born: int


@dataclass(frozen=True, slots=True)
class Pile:
    chain: Chain  # of one tensor from the middle
    num_tensors: int
    num_bytes: int  # of their storages, each counted once
    num_nodes: int  # of their graphs
    first: int
    last: int


def kind_of(tensor: Tensor) -> Kind:
    """What tells one use of tensors from another, roughly. Lengths of sequences differ from step to step, so sizes are not in it."""
    try:
        return str(tensor.dtype), tensor.dim(), tensor.grad_fn is not None
    except Exception:
        return type(tensor).__name__, 0, False


def still_alive(suspects: Iterable[Suspect]) -> list[Tensor]:
    """Their tensors, as far as there are any left. Whoever holds the list is a holder too: drop it before you ask for holders."""
    return [tensor for one in suspects if (tensor := one.ref()) is not None]


def piles(suspects: Sequence[Suspect], num_steps: int, growth: Mapping[Kind, int] | None = None, *, name: str = "") -> list[Pile]:
    """The places where suspects of all ages lie. `growth`: how many more of a kind are alive now than in the middle of the training;
    `name`: what all of them are called."""
    kinds: dict[Kind, list[Suspect]] = {}
    for one in suspects:
        tensor = one.ref()
        if tensor is not None:
            kinds.setdefault(kind_of(tensor), []).append(one)
        del tensor
    found: dict[str, Pile] = {}
    for kind in sorted(kinds, key=lambda kind: len(kinds[kind]), reverse=True)[:MAX_KINDS]:
        by_step: dict[int, list[Suspect]] = {}
        for one in kinds[kind]:
            by_step.setdefault(one.born, []).append(one)
        if len(by_step) < MIN_GENERATIONS or not _is_even(list(by_step), num_steps):
            continue
        num_late = sum(step >= num_steps / 2 for step in by_step)
        if growth is not None and growth.get(kind, 0) < max(1, num_late / 3):
            continue
        for place, pile in _in_places(by_step, num_steps, suspects, name).items():
            found.setdefault(place, pile)
    return list(found.values())


def _in_places(by_step: Mapping[int, list[Suspect]], num_steps: int, suspects: Sequence[Suspect], name: str) -> dict[str, Pile]:
    steps = sorted(by_step)
    num_samples = min(NUM_SAMPLES, len(steps))
    chosen = []
    for i in range(num_samples):
        of_step = by_step[steps[i * len(steps) // num_samples]]
        chosen.append(of_step[i % len(of_step)])  # not always the first: several places may hold tensors of one kind
    places: dict[str, list[tuple[Suspect, Chain]]] = {}  # no tensor and no container: whoever holds one is a holder too
    for one, chain in _held(chosen):
        places.setdefault(chain.place, []).append((one, chain))
    found = {}
    for place, members in places.items():
        born = [one.born for one, _ in members]
        if len(members) >= MIN_TOGETHER and _is_even(born, num_steps) and not any(chain.is_bounded for _, chain in members):
            pile = _pile(members[len(members) // 2][0], suspects, name)
            if pile is not None:
                found[place] = pile
    return found


def _held(chosen: Sequence[Suspect]) -> list[tuple[Suspect, Chain]]:
    alive = [one for one in chosen if one.ref() is not None]
    return [(one, found[0][0]) for one, found in zip(alive, traced(still_alive(alive))) if found]


def _is_even(steps: Sequence[int], num_steps: int) -> bool:
    """Whether something was left all along: early, late, and in both halves about as much."""
    early = sum(step < num_steps / 2 for step in steps)
    late = len(steps) - early
    return min(steps) <= num_steps / 4 and max(steps) >= num_steps * 5 / 8 and early <= EVEN * late and late <= EVEN * early


def _pile(one: Suspect, suspects: Sequence[Suspect], name: str) -> Pile | None:
    """What lies in the same container as this one."""
    found = next(iter(traced(still_alive([one]), name=name)), [])
    if not found:
        return None
    chain, path = found[0]
    members = [one]
    for container in reversed(path[:-1]):  # the tuple that holds it alone, then the list of all tuples
        inside = _inside(container)
        members = [other for other in suspects if id(other.ref()) in inside]
        if len(members) >= MIN_TOGETHER:
            break
    tensors = still_alive(members)
    born = [other.born for other in members]
    num_nodes = largest(tensors)[0] * sum(tensor.grad_fn is not None for tensor in tensors)
    return Pile(chain, len(tensors), storage_bytes(tensors), num_nodes, min(born, default=0), max(born, default=0))


def _inside(container: Any) -> set[int]:
    """Ids of what the container holds, also through tuples, dicts and small objects in it."""
    seen = {id(container)}
    level = [container]
    for _ in range(4):
        level = [item for item in gc.get_referents(*level) if id(item) not in seen and not isinstance(item, type)][:MAX_INSIDE]
        seen.update(map(id, level))
        if not level or len(seen) > MAX_INSIDE:
            break
    return seen
