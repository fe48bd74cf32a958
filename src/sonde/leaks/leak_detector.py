"""Tensors that are never let go: what each step of a training leaves behind for good, and who holds it.

`LeakDetector.step()` notes which tensors are alive, since when, and how large the largest autograd graph is. `leaks()` says what has
piled up all along. Optimizer state, averages of weights, full buffers and lists that are emptied now and then have not.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sonde.formatting import size
from sonde.leaks.accumulated_tensors import EVEN, Kind, Pile, Suspect, kind_of, piles, still_alive
from sonde.leaks.live_graphs import MAX_NODES, largest, live_tensors
from sonde.leaks.owners import Chain, holders, unheld
from sonde.statistics.tensor_utils import storage_bytes

MIN_STEPS = 8  # fewer points are no trend
MIN_AGE = 2  # steps: the last batch, output and loss are still in their variables
PLAIN_BYTES = 4096  # a step may leave so many bytes without a graph: a list of detached losses is a habit, not a defect
MAX_RECORDS = 256  # beyond, every second is dropped and only every second step is looked at


@dataclass(frozen=True, slots=True)
class Leak:
    """Tensors that pile up in one place."""

    chain: Chain  # by which one of them is held
    num_tensors: int  # that are alive
    num_bytes: int  # of their storages, each counted once
    num_nodes: int  # of the autograd graphs that they keep; 0 where there is none
    first_step: int  # when the oldest of them was first seen
    last_step: int

    @property
    def holder(self) -> str:
        return str(self.chain)

    @property
    def per_step_bytes(self) -> float:
        return self.num_bytes / max(1, self.last_step - self.first_step + 1)

    @property
    def cause(self) -> str:
        tensors = f"{self.num_tensors:,} tensors ({size(self.num_bytes)})" if self.num_tensors else ""
        graph = f"an autograd graph of {self.num_nodes:,} nodes" if self.num_nodes else ""
        what = " and ".join(part for part in (tensors, graph) if part)
        return f"{self.holder} keeps {what} of steps {self.first_step} to {self.last_step}, and there is more with every step."

    @property
    def fix(self) -> str:
        if self.chain.through_graph:
            return "Add up numbers instead of tensors (total += loss.item()), or detach() what is carried from step to step."
        if self.num_nodes:
            return "Keep loss.item() or output.detach() instead of the tensor itself: it holds the whole graph of its step."
        return "Empty it once it was used, or bound it, for instance with collections.deque(maxlen=1000)."

    def __str__(self) -> str:
        return f"{self.cause} {self.fix}"


@dataclass(frozen=True, slots=True)
class _Record:
    alive: Counter[Kind]  # of the tensors that were born in a step
    num_nodes: int  # of the largest graph


class LeakDetector:
    """Call `step()` once per training step, and `leaks()` when you want to know. Nothing of the training is kept or changed.

    A look costs well below a millisecond, or one pass over all of Python's objects where the collector has run since (80 ms for 300,000
    of them). The longer a training lasts, the fewer of its steps are looked at.
    """

    def __init__(self) -> None:
        self._step = -1
        self._every = 1
        self._records: list[_Record] = []
        self._born: dict[int, Suspect] = {}
        self._moved: list[int] = []  # how often the collector has moved objects between generations
        self._look()  # what is here already is not born in a step

    def step(self) -> None:
        """A step of the training has ended."""
        self._step += 1
        if self._step % self._every == 0:
            self._look()

    def leaks(self) -> list[Leak]:
        """What has piled up so far, the largest first; empty also where fewer than `MIN_STEPS` steps were seen."""
        if len(self._records) <= MIN_STEPS:
            return []
        gc.collect()  # what only waits for the collector is no leak
        # Steps are counted in the distance of the latest looks: the early ones were closer to each other.
        now = self._step // self._every
        old = [Suspect(one.ref, one.born // self._every) for one in self._born.values() if one.born >= 0]
        old = [one for one in old if one.born <= now - MIN_AGE]
        in_graphs = {id(tensor) for tensor in unheld(still_alive(old))}
        in_python = [one for one in old if id(one.ref()) not in in_graphs]
        hidden = [one for one in old if id(one.ref()) in in_graphs]
        found = as_leaks(piles(in_python, now + 1, self._growth()), self._every)
        graph = self._kept_graph()
        if graph is not None:
            found.insert(0, graph)
        holding = [leak for leak in found if leak.num_nodes]
        if len(holding) == 1 and hidden:  # what graphs have saved belongs to whoever holds them; of several nobody can tell which
            found[found.index(holding[0])] = _with_saved(holding[0], hidden)
        return sorted(found, key=lambda leak: (leak.num_bytes, leak.num_nodes), reverse=True)

    def _look(self) -> None:
        tensors = self._census()
        born: dict[int, Suspect] = {}
        for tensor in tensors:
            known = self._born.get(id(tensor))
            if known is None or known.ref() is not tensor:
                known = Suspect(weakref.ref(tensor), self._step)
            born[id(tensor)] = known
        self._born = born
        # Only those of the training: what was there before may go at any time, and would hide as much growth.
        of_steps = Counter(kind_of(tensor) for tensor in tensors if born[id(tensor)].born >= 0)
        self._records.append(_Record(of_steps, largest(tensors)[0]))
        if len(self._records) > MAX_RECORDS:
            self._records = self._records[::2]
            self._every *= 2

    def _census(self) -> list[Tensor]:
        """All live tensors. Where the collector has not moved anything to its oldest generation, the new ones are in the younger two."""
        moved = [one["collections"] for one in gc.get_stats()[1:]]
        unmoved, self._moved = moved == self._moved and sys.version_info < (3, 14), moved
        if not unmoved:
            return live_tensors()
        young = live_tensors(0) + live_tensors(1)
        seen = set(map(id, young))
        return young + [tensor for tensor in still_alive(self._born.values()) if id(tensor) not in seen]

    def _growth(self) -> dict[Kind, int]:
        """How many more tensors of a kind are alive of late, at their lowest, than in the middle of the watch at their highest."""
        records = self._records[1:]
        few = max(2, len(records) // 8)
        middle, late = records[len(records) // 2 - few : len(records) // 2 + 1], records[-few:]
        return {kind: min(one.alive[kind] for one in late) - max(one.alive[kind] for one in middle) for kind in late[-1].alive}

    def _kept_graph(self) -> Leak | None:
        """The one graph that becomes larger with every step, by the tensor at its root."""
        if not _grows_steadily([one.num_nodes for one in self._records[1:]]):
            return None
        num_nodes, root = largest(live_tensors())
        chains = holders(root, max_chains=1) if root is not None else []
        if root is None or not chains:
            return None
        links = (*chains[0].links[:-1], f"{type(root.grad_fn).__name__} graph", "all steps since 0")
        return Leak(Chain(links, chains[0].is_bounded, through_graph=True), 0, 0, num_nodes, 0, self._step)


def as_leaks(found: Sequence[Pile], every: int = 1) -> list[Leak]:
    """The piles that matter: with a graph, or of some size. Their times are multiples of `every` steps."""
    leaks = [
        Leak(pile.chain, pile.num_tensors, pile.num_bytes, pile.num_nodes, pile.first * every, pile.last * every + every - 1)
        for pile in found
    ]
    return [leak for leak in leaks if leak.num_nodes or leak.per_step_bytes >= PLAIN_BYTES]


def _with_saved(leak: Leak, hidden: Sequence[Suspect]) -> Leak:
    tensors = still_alive(hidden)
    first = min(leak.first_step, *(one.born for one in hidden))
    num_bytes = leak.num_bytes + storage_bytes(tensors)
    return Leak(leak.chain, leak.num_tensors + len(tensors), num_bytes, leak.num_nodes, first, leak.last_step)


def _grows_steadily(sizes: Sequence[int]) -> bool:
    """In each half and in the last quarter by at least a node per step, and at about the same rate. A larger graph once is no growth."""
    if sizes[-1] >= MAX_NODES:
        sizes = sizes[: next(i for i, size in enumerate(sizes) if size >= MAX_NODES) + 1]  # beyond, nothing was counted
    if len(sizes) < MIN_STEPS:
        return False
    half, quarter = len(sizes) // 2, max(2, len(sizes) // 4)
    rate = _rate(sizes)
    rates = [_rate(sizes[: half + 1]), _rate(sizes[half:]), _rate(sizes[-quarter - 1 :])]
    never_fell = min(sizes[half:]) > max(sizes[:quarter])
    return never_fell and rate >= 1 and all(rate / EVEN <= one <= rate * EVEN for one in rates)


def _rate(sizes: Sequence[int]) -> float:
    return (sizes[-1] - sizes[0]) / (len(sizes) - 1)
