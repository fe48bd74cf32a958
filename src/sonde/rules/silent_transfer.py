"""A training step moves tensors between the CPU and a device that need not be moved.

What it finds    a tensor that is brought over anew in every step, or again and again within one, although nothing in it has changed; a
                 tensor that goes from the device to the CPU and back within one step; and non_blocking=True on a tensor that is not
                 in pinned memory.
Why it matters   each such copy waits: Python for all that the device still computes, then the device for Python.
How it knows     two steps in a row were listened to, more than once in the run: every call of your code that moved a tensor (.to(),
                 .cuda(), .cpu(), copy_()). The same tensor is the same memory with the same version and the same contents (of more
                 than 1 MiB a sample of them). What comes back from the CPU does so in the memory that it came to, or has the device in
                 its graph. It is a warning where the calls take a tenth of the step; with what they waited for, so that less may be
                 gained.
Known problems   a batch is another tensor in each step, and weights change: these are silent, and so are activations that are kept on the
                 CPU until backward, and layers whose weights are on the CPU. Numbers that were computed anew on the CPU from what had come
                 there, without a graph, are not recognized as coming back. A tensor that a model holds is a matter of tensor-left-behind.
                 A constant that is too large for the device has to be brought over each time. What torch and libraries move of themselves
                 is not looked at, nor are programs with torch.compile. Not tried with a real device.
Fix              move it once, before the loop; compute on the device what is done to it on the CPU; DataLoader(..., pin_memory=True).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, ClassVar

from sonde.events import Event, Finding, Severity, Step
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.timing import MAX_XRAYS
from sonde.rules.words import amount, number, rows_of

LOOKS = 2  # pairs of steps: what one of them did may be done once in a while
LONG = 0.1  # of the step: less may not be felt
LEAST_BYTES = 1 << 16  # so much CUDA takes over at once: Python is not held up, wherever it lies

_Row = Mapping[str, Any]


@dataclass(slots=True)
class SilentTransfer:
    name: ClassVar[str] = "silent-transfer"
    explains: ClassVar[tuple[str, ...]] = ()

    is_looked_at: bool = False
    moves: bool = False
    devices: set[str] = field(default_factory=set)  # of what is trained
    looks: list[tuple[int, float, list[_Row]]] = field(default_factory=list)  # step, its ms, its transfers

    def see(self, step: Step) -> None:
        for event in step.events:
            if event.kind == "xray" and "num_transfers" in event.data:  # older runs have none
                self.is_looked_at = True
                self.moves = self.moves or amount(event.data, "num_transfers") > 0
            elif event.kind == "transfers":
                self._add(step, event)
            elif event.kind == "optimizer":
                self.devices |= {str(group.get("device")) for group in rows_of(event.data, "groups")}

    def _add(self, step: Step, event: Event) -> None:
        if len(self.looks) >= MAX_XRAYS:
            del self.looks[1::2]
        self.looks.append((step.number, step.scalar("step_ms") - step.scalar("sonde_ms"), rows_of(event.data, "transfers")))

    def answer(self) -> Answer:
        if not self.moves and self.devices == {"cpu"}:
            return Clear()
        if not self.is_looked_at:
            return NotEvaluated("no step was looked at closely")
        if not self.moves:
            return Clear()
        if len(self.looks) < LOOKS:
            return NotEvaluated(f"fewer than {LOOKS} pairs of steps were looked at closely")
        found = [finding for finding in (self._same(), self._again(), self._back(), self._pageable()) if finding is not None]
        return found or Clear()

    # -- what may be found -------------------------------------------------------------------------

    def _same(self) -> Finding | None:
        return self._finding(
            "same",
            lambda row: amount(row, "num_same") > 0,
            _same_tensors,
            "move it once, before the loop, and use what came over",
        )

    def _again(self) -> Finding | None:
        return self._finding(
            "again",
            lambda row: amount(row, "num_again") > 0 and not amount(row, "num_same"),
            lambda row: f"{row.get('line')} brings a tensor ({_size(row)}) {_between(row)} that is there already, unchanged, "
            f"{_times(amount(row, 'num_again'))} in every step",
            "move it once per step, and use what came over",
        )

    def _back(self) -> Finding | None:
        return self._finding(
            "back",
            lambda row: amount(row, "num_back") > 0,
            lambda row: f"{row.get('line')} brings back to {row.get('target')}, in every step, what {row.get('left_at') or 'another line'} "
            f"takes from there to the CPU ({_size(row)})",
            "leave it on the device, and do there what is done to it on the CPU; where it is only to leave the graph, .detach() is enough",
        )

    def _pageable(self) -> Finding | None:
        return self._finding(
            "pageable",
            lambda row: amount(row, "num_pageable") > 0 and amount(row, "what_bytes") > LEAST_BYTES,
            lambda row: f"{row.get('line')} brings a tensor ({_size(row)}) {_between(row)} with non_blocking=True, but not out of "
            "pinned memory: Python is held up all the same",
            "make the batches in pinned memory: DataLoader(..., pin_memory=True)",
            at_most=Severity.INFO,
        )

    def _finding(
        self, kind: str, is_meant: Callable[[_Row], bool], say: Callable[[_Row], str], fix: str, at_most: Severity = Severity.WARNING
    ) -> Finding | None:
        """Of the lines that did so in most looks, the one that took longest."""
        seen: dict[str, list[tuple[int, float, float, _Row]]] = {}
        for step, step_ms, rows in self.looks:
            for row in filter(is_meant, rows):
                seen.setdefault(str(row.get("line")), []).append((step, amount(row, "ms"), step_ms, row))
        usual = {line: times for line, times in seen.items() if len(times) >= max(LOOKS, len(self.looks) / 2)}
        if not usual:
            return None
        ms = {line: median(ms for _, ms, _, _ in times) for line, times in usual.items()}
        line = max(usual, key=lambda one: ms[one])
        shares = [sum(ms.values()) / step_ms for _, _, step_ms, _ in usual[line] if step_ms > 0]  # NaN where times are not logged
        share = median(shares) if shares else 0.0
        first, row = usual[line][0][0], usual[line][-1][3]
        others = _others(len(usual) - 1)
        return Finding(
            rule=self.name,
            severity=at_most if share >= LONG else Severity.INFO,
            where="",
            step=first,
            cause=say(row) + others + (f"; that takes {number(sum(ms.values()))} ms, {100 * share:.2g} % of the step" if shares else ""),
            fix=fix,
            evidence={
                "kind": kind, "bytes_per_step": amount(row, "num_bytes"), "ms_per_step": ms[line], "share": share,
                "origin": str(row.get("origin", "")), "target": str(row.get("target", "")), "source": line,
                "source_text": str(row.get("text", "")),
            },
        )  # fmt: skip


def _same_tensors(row: _Row) -> str:
    """`brings the same tensor (…) from the CPU to cuda:0 in step after step, …`"""
    num = amount(row, "num_same")
    some, them = ("tensor (", "it") if num == 1 else (f"{number(num)} tensors (the largest ", "them")
    return f"{row.get('line')} brings the same {some}{_size(row)}) {_between(row)} in step after step, and nothing in {them} has changed"


def _others(num: int) -> str:
    return f", and {num} other line{'s do' if num > 1 else ' does'} so too" if num else ""


def _times(num: float) -> str:
    return "once" if num == 1 else f"{number(num)} times"


def _between(row: _Row) -> str:
    return f"from {_place(row.get('origin'))} to {_place(row.get('target'))}"


def _place(device: object) -> str:
    return "the CPU" if device == "cpu" else str(device)


def _size(row: _Row) -> str:
    size = amount(row, "what_bytes")
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{row.get('what')}, {number(size)} {unit}"
        size /= 1024
    return f"{row.get('what')}, {number(size)} GiB"
