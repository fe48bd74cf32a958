"""Links each non-finite tensor to the operations that it came from, so that a bad result can be traced back to its origin.

An Inf that the program writes on purpose (a mask) is not an origin. If it turns into a NaN, the operation that does so is the origin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sonde.nonfinite.origin_types import Origin

MAX_EVENTS = 50_000  # a step that becomes non-finite early is non-finite in every later operation
MAX_ROOTS = 16
MAX_PER_STORAGE = 8


class Role(StrEnum):
    """How a tensor became non-finite."""

    CREATED = "created"  # from finite inputs
    WORSENED = "worsened"  # a NaN from an Inf, or a loss from a masked target
    LITERAL = "literal"  # from a literal in the program, masked_fill(mask, -inf)
    INPUT = "input"  # it was non-finite before tracing began
    PROPAGATED = "propagated"  # from non-finite inputs


@dataclass(slots=True, eq=False)
class NonFiniteEvent:
    """A tensor became non-finite: an operation output it, or it was so before tracing began."""

    role: Role
    kind: str  # "nan" | "inf"
    operation: str
    in_backward: bool
    sequence_nr: int  # of the autograd node whose forward or backward it is; -1: unknown
    is_intentional: bool
    origin: Origin | None = None  # built at once, while the tensors still hold their values
    origin_if_masked: Origin | None = None  # the same, if where() had hidden these values in the forward
    index: int = -1  # set by `PropagationGraph.add`, as are the next two
    roots: tuple[NonFiniteEvent, ...] = ()  # the events that it follows from; itself, if it is one
    ops_on_path: frozenset[str] = frozenset()  # "log", "propagated log" …: operations on all paths from the roots to here
    is_consumed: bool = False  # another operation used the tensor
    met_zero: bool = False  # an Inf that became NaN within the same autograd node: it was multiplied by 0


class PropagationGraph:
    """Stores which tensors are non-finite, by the id of their storage, and from which events they follow."""

    def __init__(self) -> None:
        self.events: list[NonFiniteEvent] = []
        self._by_storage: dict[int, list[NonFiniteEvent]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_storage)

    def events_at(self, storage: int) -> list[NonFiniteEvent]:
        return self._by_storage.get(storage, [])

    def clear(self, storage: int) -> None:
        """Mark a storage as finite: it was overwritten."""
        self._by_storage.pop(storage, None)

    def add(
        self, storage: int, event: NonFiniteEvent, parents: Sequence[NonFiniteEvent] = (), *, keep_earlier: bool = False
    ) -> list[NonFiniteEvent]:
        """Record that the tensor in a storage is non-finite, following from `parents`. With `keep_earlier`, earlier events of the storage
        stay: other parts of it may still be non-finite. Returns the event in a list, which is empty if there are already MAX_EVENTS."""
        if len(self.events) >= MAX_EVENTS:
            return []
        role, event.index = event.role, len(self.events)
        roots = {root.index: root for parent in parents for root in parent.roots}
        unintentional = [root for root in roots.values() if not root.is_intentional]
        if role in (Role.CREATED, Role.LITERAL, Role.INPUT) or not roots or (role is Role.WORSENED and not unintentional):
            event.roots = (event,)
        else:
            event.roots = tuple(sorted(unintentional or roots.values(), key=lambda root: root.index)[:MAX_ROOTS])
            event.is_intentional = not unintentional
        event.ops_on_path = frozenset((event.operation, f"{role} {event.operation}")).union(*(parent.ops_on_path for parent in parents))
        if role is Role.WORSENED:
            for root in event.roots:
                root.met_zero = root.met_zero or root.sequence_nr == event.sequence_nr
        self.events.append(event)
        earlier = self.events_at(storage) if keep_earlier else []
        self._by_storage[storage] = [*earlier, event][-MAX_PER_STORAGE:]
        return [event]


def earliest_root(ends: Iterable[NonFiniteEvent], *, include_intentional: bool) -> tuple[NonFiniteEvent, NonFiniteEvent] | None:
    """The earliest event that one of the non-finite tensors `ends` follows from, and that tensor's event. None if only masks lead to them
    and `include_intentional` is False."""
    pairs = [(root, end) for end in ends for root in end.roots]
    chosen = [pair for pair in pairs if not pair[0].is_intentional] or (pairs if include_intentional else [])
    return min(chosen, key=lambda pair: (pair[0].index, pair[1].index), default=None)
