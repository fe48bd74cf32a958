"""`LeakDetector` finds tensors that a training never releases, and the variable that holds them.

`step()` records which tensors are alive, since which step, and how large the largest autograd graph is. `leaks()` reports the tensors
that have accumulated all along. Optimizer state, averages of weights, full buffers and lists that are emptied regularly do not count.
"""

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from sonde.leaks.accumulated_tensors import MAX_RATIO, Leak, TensorKind, TrackedTensor, alive_tensors, find_leaks, tensor_kind
from sonde.leaks.autograd_graphs_alive import MAX_NODES, largest_graph, live_tensors
from sonde.leaks.find_owners_of_tensor import ReferenceChain, find_owners, without_python_referrer
from sonde.statistics.find_tensors import storage_bytes

MIN_STEPS = 8  # fewer points are no trend
MIN_AGE = 2  # steps: the last batch, output and loss are still in their variables
MAX_RECORDS = 256  # beyond, every second record is dropped and only every second step is recorded


@dataclass(frozen=True, slots=True)
class _StepRecord:
    """The live tensors at the end of a step."""

    num_alive: Counter[TensorKind]  # of the tensors that were created since the detector started
    num_nodes: int  # of the largest graph


class LeakDetector:
    """Finds tensors that accumulate: call `step()` once per training step, and `leaks()` for the result.

    `step()` takes well below a millisecond, or one pass over all of Python's objects if the collector has run since (80 ms for 300,000
    of them). The longer a training lasts, the fewer of its steps are recorded. The detector holds no reference to a tensor.
    """

    def __init__(self) -> None:
        self._step = -1
        self._every = 1
        self._records: list[_StepRecord] = []
        self._tracked: dict[int, TrackedTensor] = {}  # by id of the tensor
        self._num_collections: list[int] = []  # of the older generations of the collector, at the last record
        self._record()  # tensors that exist already are not created by a step

    def step(self) -> None:
        """A step of the training has ended."""
        self._step += 1
        if self._step % self._every == 0:
            self._record()

    def leaks(self) -> list[Leak]:
        """The leaks so far, largest first; empty if fewer than `MIN_STEPS` steps were recorded."""
        if len(self._records) <= MIN_STEPS:
            return []
        gc.collect()  # garbage in cycles is no leak
        # Steps are counted in units of the current interval: earlier records are closer to each other.
        now = self._step // self._every
        old = [TrackedTensor(one.ref, one.first_step // self._every) for one in self._tracked.values() if one.first_step >= 0]
        old = [one for one in old if one.first_step <= now - MIN_AGE]
        graph_ids = {id(tensor) for tensor in without_python_referrer(alive_tensors(old))}
        in_python = [one for one in old if id(one.ref()) not in graph_ids]
        in_graphs = [one for one in old if id(one.ref()) in graph_ids]
        found = find_leaks(in_python, now + 1, self._growth(), every=self._every)
        growing = self._growing_graph()
        if growing is not None:
            found.insert(0, growing)
        with_graph = [leak for leak in found if leak.num_nodes]
        if len(with_graph) == 1 and in_graphs:  # tensors that graphs saved; with several leaks their owner cannot be determined
            (leak,), saved = with_graph, alive_tensors(in_graphs)
            found[found.index(leak)] = replace(
                leak,
                num_tensors=leak.num_tensors + len(saved),
                num_bytes=leak.num_bytes + storage_bytes(saved),
                first_step=min(leak.first_step, *(one.first_step for one in in_graphs)),
            )
        return sorted(found, key=lambda leak: (leak.num_bytes, leak.num_nodes), reverse=True)

    def _record(self) -> None:
        tensors = self._live_tensors()
        known = {key: one for key, one in self._tracked.items() if one.ref() is not None}
        self._tracked = {id(tensor): known.get(id(tensor)) or TrackedTensor(weakref.ref(tensor), self._step) for tensor in tensors}
        # Tensors from before the training are not counted: they may be freed at any time, and would hide as much growth.
        num_alive = Counter(tensor_kind(tensor) for tensor in tensors if self._tracked[id(tensor)].first_step >= 0)
        self._records.append(_StepRecord(num_alive, largest_graph(tensors)[0]))
        if len(self._records) > MAX_RECORDS:
            self._records = self._records[::2]
            self._every *= 2

    def _live_tensors(self) -> list[Tensor]:
        """All live tensors. If the collector has moved no object to its oldest generation, new ones are in the younger two."""
        num_collections = [generation["collections"] for generation in gc.get_stats()[1:]]
        has_not_moved = num_collections == self._num_collections and sys.version_info < (3, 14)
        self._num_collections = num_collections
        if not has_not_moved:
            return live_tensors()
        young = live_tensors(0) + live_tensors(1)
        young_ids = set(map(id, young))
        return young + [tensor for tensor in alive_tensors(self._tracked.values()) if id(tensor) not in young_ids]

    def _growth(self) -> dict[TensorKind, int]:
        """By kind, the lowest number of live tensors of late minus the highest number in the middle of the training."""
        records = self._records[1:]
        few = max(2, len(records) // 8)
        middle, late = records[len(records) // 2 - few : len(records) // 2 + 1], records[-few:]
        return {
            kind: min(record.num_alive[kind] for record in late) - max(record.num_alive[kind] for record in middle)
            for kind in late[-1].num_alive
        }

    def _growing_graph(self) -> Leak | None:
        """The graph that grows with every step, with the owner of the tensor at its root."""
        if not _grows_steadily([record.num_nodes for record in self._records[1:]]):
            return None
        num_nodes, root = largest_graph(live_tensors())
        chains = find_owners(root, max_chains=1) if root is not None else []
        if root is None or not chains:
            return None
        links = (*chains[0].links[:-1], f"{type(root.grad_fn).__name__} graph", "all steps since 0")
        return Leak(ReferenceChain(links, chains[0].is_bounded, through_graph=True), 0, 0, num_nodes, 0, self._step)


def _grows_steadily(sizes: Sequence[int]) -> bool:
    """Whether a graph grows by at least a node per step, at about the same rate in each half and in the last quarter. One increase, after
    which the size stays, is no growth."""
    if sizes[-1] >= MAX_NODES:
        sizes = sizes[: next(i for i, size in enumerate(sizes) if size >= MAX_NODES) + 1]  # beyond, nodes were not counted
    if len(sizes) < MIN_STEPS:
        return False
    half, quarter = len(sizes) // 2, max(2, len(sizes) // 4)
    rate = _rate(sizes)
    rates = [_rate(sizes[: half + 1]), _rate(sizes[half:]), _rate(sizes[-quarter - 1 :])]
    never_fell = min(sizes[half:]) > max(sizes[:quarter])
    return never_fell and rate >= 1 and all(rate / MAX_RATIO <= one <= rate * MAX_RATIO for one in rates)


def _rate(sizes: Sequence[int]) -> float:
    return (sizes[-1] - sizes[0]) / (len(sizes) - 1)
