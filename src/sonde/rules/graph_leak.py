"""The graphs of earlier steps are kept: a loss or an output is stored together with everything that made it.

What it finds    `total += loss`, a list of losses or outputs, a hook or an attribute that keeps a tensor of every step with its autograd
                 graph.
Why it matters   each kept tensor keeps its whole graph, and what backward has not freed with it: memory grows with every step until there
                 is none left, and a chain of sums becomes slower to free with every link.
How it knows     the graphs of many observed steps are still alive; then, for a few steps, it is followed what stays, and asked which
                 variable, list, attribute or closure holds it.
Known problems   what throws its oldest entry out by itself (deque(maxlen=…)) is no leak. Truncated backpropagation keeps one graph, not
                 many. A list that is emptied at the end of every epoch is only found where an epoch has more than some forty steps:
                 its graphs are of no use either.
Fix              keep numbers: loss.item(), output.detach().
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.leaks import Leaks, size_of
from sonde.rules.rule import Answer, Clear, NotEvaluated

ENOUGH = 8  # observed steps in which graphs were looked for


@dataclass(slots=True)
class GraphLeak:
    name: ClassVar[str] = "graph-leak"
    explains: ClassVar[tuple[str, ...]] = ("memory-growth", "out-of-memory")

    leaks: Leaks = field(default_factory=Leaks)
    num_looked: int = 0
    most_kept: float = 0.0

    def see(self, step: Step) -> None:
        self.leaks.see(step)
        kept = step.scalar("kept_graphs")
        if kept == kept:
            self.num_looked += 1
            self.most_kept = max(self.most_kept, kept)

    def answer(self) -> Answer:
        held = [(step, leak) for step, leak in self.leaks.found if leak.get("num_nodes")]
        if not held:
            if self.num_looked < ENOUGH:
                return NotEvaluated(f"fewer than {ENOUGH} steps were looked at")
            return Clear()
        step, leak = held[0]
        return [
            Finding(
                rule=self.name,
                severity=Severity.WARNING,
                where="",
                step=step,
                cause=f"{str(leak.get('cause', '')).rstrip('.')}",
                fix=str(leak.get("fix", "")).rstrip("."),
                evidence={
                    "holder": str(leak.get("holder", "")),
                    "graph_nodes": float(leak.get("num_nodes", 0)),
                    "kept": size_of(leak.get("num_bytes")),
                    "graphs_alive": self.most_kept,
                },
            )
        ]
