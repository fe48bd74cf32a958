"""Reading a tape: for every layer, what its calls and nodes cost, itself and with what it calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from sonde.profiler import Span
from sonde.profiler.module_timers import Layer
from sonde.profiler.time_trace import ENGINE, LOSS, OURS, Call, Tape


class Cost(NamedTuple):
    """Of one layer in one step, in units of the tape's readings, with what the measuring added."""

    calls: int = 0
    forward: int = 0
    forward_self: int = 0
    backward: int = 0
    backward_self: int = 0
    num_calls: int = 0  # within all of it: each added something to `forward`
    num_calls_self: int = 0  # made by the layer itself: each added something to `forward_self`
    num_nodes: int = 0  # the same for the backward
    num_nodes_self: int = 0


@dataclass(slots=True)
class Figures:
    layers: dict[int, Cost] = field(default_factory=dict)  # in the order of first calls
    loss_backward: int = 0  # nodes made outside of all modules
    engine: int = 0  # before the first node
    forward: int = 0  # all outermost calls
    backward: int = 0  # all backwards, from beginning to end
    num_calls: int = 0  # but for the outermost
    num_nodes: int = 0
    num_nodes_loss: int = 0


def figures(tape: Tape) -> Figures:
    found = Figures()
    calls = [call for call in tape.calls if call.ended >= 0 or call.began < 0]
    _forward(calls)
    _backward(tape, found)
    for call in reversed(calls):
        call.back_all += call.back
        call.marks_all += call.marks
        if call.parent is not None:
            call.parent.back_all += call.back_all
            call.parent.marks_all += call.marks_all
    rows: dict[int, list[int]] = {}
    for call in calls:
        row = rows.setdefault(call.layer, [0] * len(Cost._fields))
        took = call.ended - call.began
        own = (int(call.ended >= 0), 0, took - call.inside, 0, call.back, 0, call.num_inside, 0, call.marks)
        whole = (0, took, 0, call.back_all, 0, call.num_all, 0, call.marks_all, 0) if not _within_itself(call) else ()
        for values in (own, whole):
            for at, value in enumerate(values):
                row[at] += value
        if call.parent is None:
            found.forward += took
            found.num_calls += call.num_all
    found.layers = {layer: Cost(*row) for layer, row in rows.items()}
    found.backward = sum(end - tape.marks[first][0] for first, _, end in tape.ends)
    return found


def _forward(calls: list[Call]) -> None:
    for call in reversed(calls):
        parent = call.parent
        if parent is not None:
            parent.inside += call.ended - call.began
            parent.num_inside += 1
            parent.num_all += call.num_all + 1


def _backward(tape: Tape, found: Figures) -> None:
    for reading, until, owner in intervals(tape):
        took = until - reading
        found.num_nodes += 1
        if owner is ENGINE:
            found.engine += took
        elif owner is LOSS:
            found.loss_backward += took
            found.num_nodes_loss += 1
        elif owner is not OURS:
            owner.back += took
            owner.marks += 1


def intervals(tape: Tape) -> Iterator[tuple[int, int, Call]]:
    """Each mark with the reading at which the next one begins."""
    for first, after, end in tape.ends:
        for at in range(first, after):
            reading, owner = tape.marks[at]
            yield reading, tape.marks[at + 1][0] if at + 1 < after else end, owner


def _within_itself(call: Call) -> bool:
    """A module that calls itself is counted where it was called from outside."""
    above = call.parent
    while above is not None:
        if above.layer == call.layer:
            return True
        above = above.parent
    return False


# -- for a trace ----------------------------------------------------------------------------------


def spans(tape: Tape, layers: list[Layer], step: int, zero: int) -> Iterator[Span]:
    """Calls in the forward; in the backward, nodes joined into stretches of one owner, inside those of the modules around it."""

    def span(kind: str, name: str, began: int, ended: int) -> Span:
        return Span(step, kind, name, (began - zero) / 1e6, (ended - began) / 1e6)

    for call in tape.calls:
        if call.ended >= 0:
            yield span("forward", layers[call.layer].path, call.began, call.ended)
    open_calls: list[tuple[Call, int]] = []
    last = 0
    for reading, until, owner in intervals(tape):
        if reading != last:  # another backward
            yield from (span("backward", layers[call.layer].path, began, last) for call, began in open_calls)
            open_calls.clear()
        if owner is LOSS:
            yield span("backward", "(loss)", reading, until)
        chain = list(_chain(owner)) if owner.layer >= 0 else []
        kept = _num_common(open_calls, chain)
        yield from (span("backward", layers[call.layer].path, began, reading) for call, began in open_calls[kept:])
        open_calls[kept:] = [(call, reading) for call in chain[kept:]]
        last = until
    yield from (span("backward", layers[call.layer].path, began, last) for call, began in open_calls)


def _num_common(open_calls: list[tuple[Call, int]], chain: list[Call]) -> int:
    pairs = zip(open_calls, chain)
    return next((at for at, ((call, _), other) in enumerate(pairs) if call is not other), min(len(open_calls), len(chain)))


def _chain(call: Call) -> Iterable[Call]:
    chain: list[Call] = []
    above: Call | None = call
    while above is not None:
        chain.append(above)
        above = above.parent
    return reversed(chain)
