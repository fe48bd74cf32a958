"""Which lines of the user's code call backward, optimizer.step() and so on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sonde.events import CallSiteFound, OptimizerCreated

if TYPE_CHECKING:
    from sonde.run_view.run_view import RunView

MAX_LINES = 20  # per kind of call: a report names one, a program has a few


@dataclass(frozen=True, slots=True)
class CallLines:
    """The lines by kind of call, in the order in which they were first executed."""

    lines: Mapping[str, Sequence[str]]
    texts: Mapping[str, str]  # source text by line
    losses: frozenset[str]  # names of the loss scalars, one per line that calls backward

    @classmethod
    def of(cls, view: RunView) -> CallLines:
        lines: dict[str, list[str]] = {}
        texts: dict[str, str] = {}
        losses: dict[str, None] = {}
        for event in view.events(OptimizerCreated, CallSiteFound):
            if isinstance(event, OptimizerCreated):
                call, line, text = "optimizer", event.source, event.text
            else:
                assert isinstance(event, CallSiteFound)
                call, line, text = event.call, event.line, event.text
                if call == "backward" and len(losses) < MAX_LINES:
                    losses[event.series or "loss"] = None
            known = lines.setdefault(call, [])
            if line and line not in known and len(known) < MAX_LINES:
                known.append(line)
                if text:
                    texts[line] = text
        return cls(lines, texts, frozenset(losses))

    def line(self, call: str) -> str:
        """The first line that makes this call; empty if none is known."""
        return next(iter(self.lines.get(call, ())), "")

    def at(self, call: str) -> str:
        """` at train.py:41`, or nothing: for the end of a sentence."""
        line = self.line(call)
        return f" at {line}" if line else ""

    def evidence(self, call: str) -> dict[str, float | str]:
        line = self.line(call)
        return source_evidence(line, self.texts.get(line, ""))


def source_evidence(line: str, text: str) -> dict[str, float | str]:
    """A line of the user's code as evidence of a finding; empty if it is not known."""
    return {name: value for name, value in (("source", line), ("source_text", text)) if line and value}
