"""A tensor that a model uses stays behind on the CPU when the model is moved to a device.

What it finds    a tensor that is a plain attribute of a module (self.mask = torch.ones(…)), which model.to(device) does not move,
                 and that is brought over anew whenever it is used.
Why it matters   each time, the training waits for a copy that need not be; such tensors are also missing from checkpoints.
How it knows     most parameters of the model are on a device, the attribute is on the CPU, and a line of the training brings it over:
                 one that was seen doing so in two steps in a row, or in whose text its name is.
Known problems   an attribute that no line brings over may never be used: that, and parameters or buffers that are kept on the CPU
                 (offloading), are only mentioned. Tensors with a single number are handed over with the call and do not count.
Fix              self.register_buffer("mask", torch.ones(…)), with persistent=False where it does not belong into a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.source import Sources
from sonde.rules.words import amount, listing, number, rows_of

MAX_TENSORS = 20  # that are named in one finding or looked for in the lines


@dataclass(slots=True)
class TensorLeftBehind:
    name: ClassVar[str] = "tensor-left-behind"
    explains: ClassVar[tuple[str, ...]] = ()

    sources: Sources = field(default_factory=Sources)
    num_looks: int = 0
    left: list[Mapping[str, Any]] = field(default_factory=list)
    step: int = -1
    brought: dict[str, str] = field(default_factory=dict)  # what a line was seen bringing over, and that line

    def see(self, step: Step) -> None:
        self.sources.see(step)
        for event in step.events:
            if event.kind == "membership":
                self.num_looks += 1
                left = event.data.get("left_behind")
                self.left = [row for row in left if isinstance(row, Mapping)][:MAX_TENSORS] if isinstance(left, list) else []
                if self.left and self.step < 0:
                    self.step = step.number
            elif event.kind == "transfers":
                for row in rows_of(event.data, "transfers"):
                    held, line = row.get("held_as"), str(row.get("line"))
                    if isinstance(held, list) and held and len(self.brought) < MAX_TENSORS:
                        self.brought |= {str(path): line for path in held[:MAX_TENSORS]}
                        self.sources.texts[line] = str(row.get("text", ""))

    def answer(self) -> Answer:
        if not self.num_looks:
            return NotEvaluated("no watched model has trained")
        if not self.left:
            return Clear()
        moved = [(row, line) for row in self.left if (line := self._brought_over_at(row))]
        if moved:
            rows, line = [row for row, _ in moved], moved[0][1]
            return [self._finding(rows, Severity.WARNING, f"is brought over again whenever it is used, at {line}", line)]
        return [self._finding(self.left, Severity.INFO, "is on the CPU", "")]

    def _brought_over_at(self, row: Mapping[str, Any]) -> str:
        if row.get("kind") != "attribute":
            return ""
        if line := self.brought.get(str(row.get("path", ""))):
            return line
        attribute = re.escape(str(row.get("path", "")).rpartition(".")[2])
        moves = re.compile(rf"\.{attribute}\b[^=]*\.(to|cuda)\(")
        return next((line for line in self.sources.lines.get("transfer", ()) if moves.search(self.sources.texts.get(line, ""))), "")

    def _finding(self, rows: list[Mapping[str, Any]], severity: Severity, what: str, line: str) -> Finding:
        names = listing([str(row.get("path", "")) for row in rows])
        home = str(rows[0].get("model_on", "a device"))
        elements = sum(amount(row, "num_elements") for row in rows)
        return Finding(
            rule=self.name,
            severity=severity,
            where=str(rows[0].get("path", "")),
            step=self.step,
            cause=f"the model is on {home}, and {names} ({number(elements)} numbers) {what}",
            fix="register it, so that model.to(device) takes it along: self.register_buffer(name, tensor, persistent=False)",
            evidence={
                "num_tensors": len(rows), "num_elements": elements, "kind": str(rows[0].get("kind", "")),
                **({"source": line, "source_text": self.sources.texts.get(line, "")} if line else {}),
            },
        )  # fmt: skip
