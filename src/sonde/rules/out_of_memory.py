"""The training ended because there was no memory left.

What it finds    an error that says so: torch.OutOfMemoryError, MemoryError, or torch's "can't allocate memory".
Why it matters   the run is over, and the error itself says neither what had filled the memory nor what to do.
How it knows     from the error and its traceback: what was asked for, in which module and on which line; from the models and optimizers
                 what they took; and, where the model can be run with fake tensors, which batch would have had room.
Known problems   a process that the system kills (exit code 137) has no last word: memory-growth may have told why. The batch that would
                 fit is an estimate without the loss, whose memory is not known.
Fix              a smaller batch with accumulated gradients, activation checkpointing, or an optimizer with less state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.leaks import size_of
from sonde.rules.rule import Answer, Clear, NotEvaluated

PARTS = {
    "parameters": "parameters", "gradients": "gradients", "optimizer_state": "optimizer state", "rest": "activations and everything else",
}  # fmt: skip
WORDS = {
    "forward": "in the forward", "backward": "in the backward", "optimizer": "in the optimizer's step", "data": "while data were loaded",
}  # fmt: skip


@dataclass(slots=True)
class OutOfMemory:
    name: ClassVar[str] = "out-of-memory"
    explains: ClassVar[tuple[str, ...]] = ()

    num_steps: int = 0
    step: int = -1
    data: Mapping[str, Any] = field(default_factory=dict)

    def see(self, step: Step) -> None:
        self.num_steps += 1
        for event in step.events:
            if event.kind == "out_of_memory" and self.step < 0:
                self.step, self.data = event.step, dict(event.data)

    def answer(self) -> Answer:
        if self.step < 0:
            return Clear() if self.num_steps else NotEvaluated("no step was seen")
        data = self.data
        found = {name: data.get(name) for name in ("requested", "in_use", "limit") if data.get(name)}
        evidence: dict[str, float | str] = {name: size_of(value) for name, value in found.items()}
        evidence |= {words: size_of(data[name]) for name, words in PARTS.items() if data.get(name)}
        if data.get("source"):
            evidence |= {"source": str(data["source"]), "source_text": str(data.get("text", ""))}
        for number, operand in enumerate(_strings(data.get("operands")), 1):
            evidence[f"operand {number}"] = operand
        if data.get("batch_size"):
            evidence["batch_size"] = float(data["batch_size"])
        if data.get("batch_fits"):
            evidence["batch_that_fits"] = float(data["batch_fits"])
        return [
            Finding(self.name, Severity.CRITICAL, str(data.get("module", "")), self.step, self._cause(), self._fix(), evidence),
        ]  # fmt: skip

    def _cause(self) -> str:
        data = self.data
        module = str(data.get("module", ""))
        kind = f" ({data['module_type']})" if data.get("module_type") else ""
        at = f" at {data['source']}" if data.get("source") else ""
        where = " ".join(part for part in (WORDS.get(str(data.get("phase", "")), ""), f"of {module}{kind}" if module else "") if part)
        shape = f" for {data['shape']}" if data.get("shape") else ""
        asked = f"{size_of(data['requested'])}{shape} more were asked for" if data.get("requested") else "more was asked for"
        parts = [f"{words} {size_of(data[name])}" for name, words in PARTS.items() if data.get(name)]
        filled = f" while {size_of(data.get('in_use'))} were in use ({', '.join(parts)})" if data.get("in_use") else ""
        limit = f", of the {size_of(data['limit'])} that {data.get('limit_by', '')} gives" if data.get("limit") else ""
        return f"memory ran out{' ' if where else ''}{where}{at}: {asked}{filled}{limit}"

    def _fix(self) -> str:
        data = self.data
        limit, asked, phase = data.get("limit") or 0, data.get("requested") or 0, data.get("phase")
        fits, batch = data.get("batch_fits"), data.get("batch_size")
        operands = ", ".join(_strings(data.get("operands")))
        if limit and asked > limit:
            shapes = f" ({operands}): shapes that differ are broadcast" if operands else ""
            return f"this one tensor is larger than all of the memory: check the shapes on that line{shapes}"
        if phase == "data":
            return "read the data in pieces: a memory map, an IterableDataset, or one file per sample"
        if phase == "optimizer":
            return "use an optimizer with less state (SGD with momentum keeps half of Adam's, Adafactor next to none), or foreach=False"
        if fits and batch:
            return (
                f"use a batch of at most about {fits} instead of {batch}, with accumulated gradients if the result must be the same; "
                "or compute activations again in backward (torch.utils.checkpoint)"
            )
        if fits == 0:
            return "not even a batch of 1 has room: checkpoint the activations (torch.utils.checkpoint), or make the model smaller"
        return "use a smaller batch, or compute activations again in backward (torch.utils.checkpoint); sonde memory tells what is needed"


def _strings(values: Any) -> list[str]:
    return [str(value) for value in values or ()]
