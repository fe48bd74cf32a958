"""Reading a tape: for every layer, what its calls and nodes cost, itself and with what it calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from sonde.profiles import Span
from sonde.workbench.profiling.doors import Layer
from sonde.workbench.profiling.tape import ENGINE, LOSS, OURS, Call, Tape


class Cost(NamedTuple):
    """Of one layer in one step, in units of the tape's readings."""

    calls: int
    forward: int
    forward_self: int
    backward: int
    backward_self: int


@dataclass(slots=True)
class Figures:
    layers: dict[int, Cost] = field(default_factory=dict)  # in the order of first calls
    loss_backward: int = 0  # nodes made outside of all modules
    engine: int = 0  # before the first node
    forward: int = 0  # all outermost calls
    backward: int = 0  # all backwards, from beginning to end


def figures(tape: Tape, *, door: int = 0, node: int = 0) -> Figures:
    """`door` and `node` are what each call and each mark added, to be taken off."""
    found = Figures()
    calls = [call for call in tape.calls if call.ended >= 0 or call.began < 0]
    _forward(calls)
    _backward(tape, found, node)
    for call in reversed(calls):
        call.back_all += call.back
        if call.parent is not None:
            call.parent.back_all += call.back_all
    rows: dict[int, list[int]] = {}
    for call in calls:
        row = rows.setdefault(call.layer, [0, 0, 0, 0, 0])
        took = call.ended - call.began
        if call.ended >= 0:
            row[0] += 1
            row[2] += max(0, took - call.inside - door * call.num_inside)
        row[4] += call.back
        if not _within_itself(call):
            row[1] += max(0, took - door * call.num_all)
            row[3] += call.back_all
        if call.parent is None:
            found.forward += max(0, took)
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


def _backward(tape: Tape, found: Figures, node: int) -> None:
    for reading, until, owner in intervals(tape):
        took = max(0, until - reading - node)
        if owner is ENGINE:
            found.engine += took
        elif owner is LOSS:
            found.loss_backward += took
        elif owner is not OURS:
            owner.back += took


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
