"""What inquests found: tensors that pile up, and who holds them. Two rules read it, each for its own defect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sonde.events import Step
from sonde.formatting import size

MAX_KEPT = 8  # a run has a few inquests at most; what is kept of them is bounded all the same


@dataclass(slots=True)
class Leaks:
    found: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)  # step, and the leak
    num_inquests: int = 0

    def see(self, step: Step) -> None:
        for event in step.events:
            if event.kind == "leaks":
                self.num_inquests += 1
                listed = event.data.get("leaks")
                for leak in listed if isinstance(listed, list) else ():
                    if isinstance(leak, Mapping) and len(self.found) < MAX_KEPT:
                        self.found.append((event.step, leak))


def size_of(value: Any) -> str:
    """Bytes of an event as a person says them; `unknown` where there are none."""
    return size(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else "unknown"
