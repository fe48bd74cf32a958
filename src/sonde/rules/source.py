"""Which line of the user's code made a call, as far as the run knows."""

from __future__ import annotations

from dataclasses import dataclass, field

from sonde.events import Step

MAX_LINES = 20  # per kind of call: a report names one, a program has a few; the rest would only be kept


@dataclass(slots=True)
class Sources:
    """The lines that called backward, optimizer.step() and so on, in the order in which they were first seen."""

    lines: dict[str, list[str]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    series: set[str] = field(default_factory=set)  # names of the losses, one per line that calls backward

    def see(self, step: Step) -> None:
        for event in step.events:
            if event.kind == "optimizer":
                self._add("optimizer", event.data.get("source"), str(event.data.get("text", "")))
            elif event.kind == "source":
                call = str(event.data.get("call", ""))
                self._add(call, event.data.get("line"), str(event.data.get("text", "")))
                if call == "backward" and len(self.series) < MAX_LINES:
                    self.series.add(str(event.data.get("series", "loss")))

    def _add(self, call: str, line: object, text: str) -> None:
        known = self.lines.setdefault(call, [])
        if isinstance(line, str) and line and line not in known and len(known) < MAX_LINES:
            known.append(line)
            if text:
                self.texts[line] = text

    def line(self, call: str) -> str:
        """The first line that made this call; empty where none is known."""
        return next(iter(self.lines.get(call, ())), "")

    def at(self, call: str) -> str:
        """` at train.py:41`, or nothing: for the end of a sentence."""
        line = self.line(call)
        return f" at {line}" if line else ""

    def evidence(self, call: str) -> dict[str, float | str]:
        line = self.line(call)
        if not line:
            return {}
        text = self.texts.get(line, "")
        return {"source": line, "source_text": text} if text else {"source": line}
