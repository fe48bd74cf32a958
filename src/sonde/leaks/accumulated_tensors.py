"""Finds the containers in which tensors of all steps accumulate.

An accumulation holds tensors of every part of the training, about as many of its second half as of its first. A full buffer holds no
old tensors, a cache that has stopped growing holds no new ones, and a container that drops its oldest entries does not accumulate.
"""

import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sonde.formatting import size
from sonde.leaks.autograd_graphs_alive import largest_graph
from sonde.leaks.find_owners_of_tensor import ReferenceChain, find_owner_paths
from sonde.statistics.find_tensors import storage_bytes

MIN_STEPS_LEFT = 5  # steps of which a tensor is still alive; fewer are no trend
MAX_RATIO = 2.5  # of one half of the training to the other: a cache that fills up leaves less and less
NUM_SAMPLES = 12  # tensors of a kind whose owner is searched: that takes a fraction of a second each
MIN_TENSORS = 3  # in one container
MAX_KINDS = 6
MIN_BYTES_PER_STEP = 4096  # for tensors without a graph: a list of detached losses is common and harmless
MAX_CONTENTS = 200_000  # objects of a container that are visited

TensorKind = tuple[str, int, bool]  # dtype, number of dimensions, whether it has a graph


@dataclass(frozen=True, slots=True)
class TrackedTensor:
    """A weak reference to a tensor, and the step in which it was first found alive."""

    ref: weakref.ref[Tensor]
    first_step: int


@dataclass(frozen=True, slots=True)
class Leak:
    """Tensors that accumulate in one container."""

    chain: ReferenceChain  # of one of the tensors
    num_tensors: int  # that are alive
    num_bytes: int  # of their storages, each counted once
    num_nodes: int  # of the autograd graphs that they keep; 0 without a graph
    first_step: int  # in which the oldest of them was first found
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


def tensor_kind(tensor: Tensor) -> TensorKind:
    """A rough class of tensors of the same use. Sizes are not in it: lengths of sequences differ from step to step."""
    try:
        return str(tensor.dtype), tensor.dim(), tensor.grad_fn is not None
    except Exception:
        return type(tensor).__name__, 0, False


def alive_tensors(tracked: Iterable[TrackedTensor]) -> list[Tensor]:
    """The tensors that are still alive. The list is a referrer of each of them: drop it before a search for owners."""
    return [tensor for one in tracked if (tensor := one.ref()) is not None]


def find_leaks(
    tracked: Sequence[TrackedTensor], num_steps: int, growth: Mapping[TensorKind, int] | None = None, *, name: str = "", every: int = 1
) -> list[Leak]:
    """The containers that hold tensors of all parts of the training: with a graph, or large.

    Arguments:
        tracked: the tensors that are older than a step's own.
        num_steps: the length of the training; `first_step` counts in the same unit.
        growth: by kind, how many more tensors are alive now than in the middle of the training; None: not checked.
        name: what chains call the tensors; their type and shape by default.
        every: the number of training steps in a unit of `first_step`.
    """
    kinds: dict[TensorKind, list[TrackedTensor]] = {}
    for one in tracked:
        tensor = one.ref()
        if tensor is not None:
            kinds.setdefault(tensor_kind(tensor), []).append(one)
        del tensor
    found: dict[str, Leak] = {}
    for kind in sorted(kinds, key=lambda kind: len(kinds[kind]), reverse=True)[:MAX_KINDS]:
        by_step: dict[int, list[TrackedTensor]] = {}
        for one in kinds[kind]:
            by_step.setdefault(one.first_step, []).append(one)
        num_late = sum(step >= num_steps / 2 for step in by_step)
        has_grown = growth is None or growth.get(kind, 0) >= max(1, num_late / 3)
        if len(by_step) < MIN_STEPS_LEFT or not _is_even(list(by_step), num_steps) or not has_grown:
            continue
        for container, leak in _by_container(by_step, num_steps, tracked, name).items():
            found.setdefault(container, leak)
    leaks = [replace(leak, first_step=leak.first_step * every, last_step=leak.last_step * every + every - 1) for leak in found.values()]
    return [leak for leak in leaks if leak.num_nodes or leak.per_step_bytes >= MIN_BYTES_PER_STEP]


def _by_container(
    by_step: Mapping[int, list[TrackedTensor]], num_steps: int, tracked: Sequence[TrackedTensor], name: str
) -> dict[str, Leak]:
    """The accumulations among tensors of one kind, found by the owners of a sample of them."""
    steps = sorted(by_step)
    num_samples = min(NUM_SAMPLES, len(steps))
    sample = []
    for i in range(num_samples):
        of_step = by_step[steps[i * len(steps) // num_samples]]
        sample.append(of_step[i % len(of_step)])  # not always the first: several containers may hold tensors of one kind
    # Neither tensors nor containers are stored here: that would make this dict one of their owners.
    containers: dict[str, list[tuple[TrackedTensor, ReferenceChain]]] = {}
    for one, chain in _shortest_chains(sample):
        containers.setdefault(chain.container, []).append((one, chain))
    found = {}
    for container, members in containers.items():
        first_steps = [one.first_step for one, _ in members]
        if len(members) >= MIN_TENSORS and _is_even(first_steps, num_steps) and not any(chain.is_bounded for _, chain in members):
            leak = _measure(members[len(members) // 2][0], tracked, name)
            if leak is not None:
                found[container] = leak
    return found


def _shortest_chains(sample: Sequence[TrackedTensor]) -> list[tuple[TrackedTensor, ReferenceChain]]:
    alive = [one for one in sample if one.ref() is not None]
    return [(one, found[0][0]) for one, found in zip(alive, find_owner_paths(alive_tensors(alive))) if found]


def _is_even(steps: Sequence[int], num_steps: int) -> bool:
    """Whether tensors were left behind all along: early, late, and about as many in both halves."""
    early = sum(step < num_steps / 2 for step in steps)
    late = len(steps) - early
    return min(steps) <= num_steps / 4 and max(steps) >= num_steps * 5 / 8 and early <= MAX_RATIO * late and late <= MAX_RATIO * early


def _measure(one: TrackedTensor, tracked: Sequence[TrackedTensor], name: str) -> Leak | None:
    """The accumulation in the container of this tensor."""
    found = next(iter(find_owner_paths(alive_tensors([one]), name=name)), [])
    if not found:
        return None
    chain, path = found[0]
    members = [one]
    for container in reversed(path[:-1]):  # first the tuple that holds this tensor alone, then the list of all tuples
        contents = _contents(container)
        members = [other for other in tracked if id(other.ref()) in contents]
        if len(members) >= MIN_TENSORS:
            break
    tensors = alive_tensors(members)
    first_steps = [other.first_step for other in members]
    num_nodes = largest_graph(tensors)[0] * sum(tensor.grad_fn is not None for tensor in tensors)
    return Leak(chain, len(tensors), storage_bytes(tensors), num_nodes, min(first_steps, default=0), max(first_steps, default=0))


def _contents(container: Any) -> set[int]:
    """Ids of the objects in a container, also through tuples, dicts and small objects in it."""
    ids = {id(container)}
    level = [container]
    for _ in range(4):
        level = [item for item in gc.get_referents(*level) if id(item) not in ids and not isinstance(item, type)][:MAX_CONTENTS]
        ids.update(map(id, level))
        if not level or len(ids) > MAX_CONTENTS:
            break
    return ids
