"""From bad tensor to bad tensor: which operation each came from, so that a bad result can be followed back to where it began.

An Inf that the program wrote on purpose (a mask) begins nothing; where it does harm, that operation is the beginning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sonde.nonfinite.origin import Origin

MAX_EVENTS = 50_000  # a step that went bad early is bad in every operation after that
MAX_ROOTS = 16
MAX_PER_STORAGE = 8

BORN, HARMED, WRITTEN, GIVEN, PASSED = "born", "harmed", "written", "given", "passed"


@dataclass(slots=True, eq=False)
class Event:
    """A tensor became bad: an operation put it out, or it came from outside."""

    number: int
    nature: str  # born: of finite numbers; harmed: NaN of Inf; written: by the program; given: from before; passed: on
    kind: str  # "nan" | "inf"
    operation: str
    backward: bool
    roots: tuple[Event, ...]  # where it began; itself, if here
    along: frozenset[str]  # "log", "passed log" …: operations on all ways from the roots to here
    node: int  # of autograd, whose forward or backward it is
    on_purpose: bool
    origin: Origin | None = None  # told at once, while the numbers are there
    if_hidden: Origin | None = None  # the same, if where() had hidden these numbers
    is_used: bool = False  # something was computed from it
    met_zero: bool = False  # an Inf that became NaN within the same node: it was multiplied by 0


class Trail:
    """What is bad, by the memory that it lies in."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._at: dict[int, list[Event]] = {}

    def __bool__(self) -> bool:
        return bool(self._at)

    def at(self, storage: int) -> list[Event]:
        return self._at.get(storage, [])

    def forget(self, storage: int) -> None:
        """That memory was written anew, with finite numbers."""
        self._at.pop(storage, None)

    def add(
        self,
        storage: int,
        parents: Iterable[Event],
        *,
        nature: str,
        kind: str,
        operation: str,
        backward: bool,
        node: int,
        origin: Origin | None = None,
        if_hidden: Origin | None = None,
        on_purpose: bool = False,
        keep: bool = False,
    ) -> Event | None:
        """Note that the tensor in that memory is bad. `keep`: what was bad in other parts of it still is."""
        if len(self.events) >= MAX_EVENTS:
            return None
        parents = list(parents)
        before = {root.number: root for parent in parents for root in parent.roots}
        event = Event(len(self.events), nature, kind, operation, backward, (), frozenset(), node, on_purpose, origin, if_hidden)
        blamed = [root for root in before.values() if not root.on_purpose]
        if nature in (BORN, WRITTEN, GIVEN) or not before or (nature == HARMED and not blamed):
            event.roots = (event,)
        else:
            event.roots = tuple(sorted(blamed or before.values(), key=lambda root: root.number)[:MAX_ROOTS])
            event.on_purpose = not blamed
        event.along = frozenset((operation, f"{nature} {operation}")).union(*(parent.along for parent in parents))
        if nature == HARMED:
            for root in event.roots:
                root.met_zero = root.met_zero or root.node == node
        self.events.append(event)
        here = self._at.setdefault(storage, [])
        if not keep:
            here.clear()
        here.append(event)
        del here[:-MAX_PER_STORAGE]
        return event


def beginning(ends: Iterable[Event], *, even_on_purpose: bool) -> tuple[Event, Event] | None:
    """The earliest event from which one of these bad tensors follows, and that tensor; None where only masks lead to them."""
    pairs = [(root, end) for end in ends for root in end.roots]
    chosen = [pair for pair in pairs if not pair[0].on_purpose] or (pairs if even_on_purpose else [])
    return min(chosen, key=lambda pair: (pair[0].number, pair[1].number), default=None)
