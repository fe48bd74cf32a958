"""What the look back found: the first bad number of a run and where it was made. Several rules read it, each for its own defects."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sonde.record import Finding, Severity, Step
from sonde.rules.activity import count
from sonde.rules.rule import Answer, Clear, NotEvaluated

FOLLOWS = (
    "nonfinite-loss", "lr-divergence", "exploding-gradient", "vanishing-gradient", "dead-relu", "loss-plateau", "unchanged-parameter",
)  # fmt: skip
"""What a bad number leads to. Divergence may also lead to a bad number: whichever came first is the cause."""

KEYS = {  # defects that have rules of their own
    "unstable-softmax": ("unstable-softmax",),
    "nan-grad-sqrt-zero": ("sqrt-at-zero", "norm-at-zero"),
    "nan-grad-where": ("nan-grad-where",),
    "all-targets-ignored": ("all-targets-ignored",),
    "fp16-overflow": ("fp16-overflow",),
}
BAD_NUMBERS = ("nonfinite-loss", "nonfinite-origin", *KEYS)  # rules that speak of them: for those that know what led to it
MAX_SAID = 8  # samples in a sentence
MAX_INPUTS = 4  # tensors among the evidence


@dataclass(slots=True)
class Origins:
    """A fold: the first origin, how often one was found, and why none was where none was."""

    step: int = -1
    data: Mapping[str, Any] = field(default_factory=dict)
    num: int = 0
    num_backwards: int = 0
    unknown: str = ""

    def see(self, step: Step) -> None:
        self.num_backwards += count(step, "backwards")
        for event in step.events:
            if event.kind == "origin":
                self.num += 1
                if self.step < 0:
                    self.step, self.data = event.step, dict(event.data)
            elif event.kind == "origin_unknown" and not self.unknown:
                self.unknown = str(event.data.get("reason", ""))

    def answer(self, rule: str, keys: Collection[str] | None = None) -> Answer:
        """A finding where the origin is one of these defects; without keys, where it is none that has a rule of its own."""
        if self.step < 0:
            if self.unknown and keys is None:
                return NotEvaluated(f"a number is not finite, and where it was made could not be found: {self.unknown}")
            return Clear() if self.num_backwards else NotEvaluated("no backward was seen")
        key = str(self.data.get("key", ""))
        mine = key in keys if keys is not None else not any(key in claimed for claimed in KEYS.values())
        return [self._finding(rule)] if mine else Clear()

    def _finding(self, rule: str) -> Finding:
        data = self.data
        module, parameters = str(data.get("module", "")), _strings(data.get("parameters"))
        phase, operation = str(data.get("phase", "")), str(data.get("operation", ""))
        made = "NaN" if data.get("kind") == "nan" else "Inf"
        at = f" at {data['source']}" if data.get("source") else ""
        if phase in ("forward", "backward"):
            begins = f"{'the backward of ' if phase == 'backward' else ''}{operation} made the first {made}{at}"
        else:
            begins = f"a {phase} held {made} already when {operation} used it{at}"
        return Finding(
            rule=rule,
            severity=Severity.CRITICAL,
            where=next(iter(parameters), module) if phase == "parameter" else module,
            step=self.step,
            cause=f"{begins}: {data.get('cause', '')}{self._blamed()}",
            fix=str(data.get("fix", "")),
            evidence=self._evidence(operation, phase),
        )

    def _blamed(self) -> str:
        samples = self.data.get("samples")
        if samples is None:
            return ""
        if not samples:
            return "; it takes the whole batch"
        indices, several = self.data.get("indices"), len(samples) > 1
        of_dataset = f" (item{'s' if several else ''} {_some(indices)} of the dataset)" if indices else ""
        return f"; {'samples' if several else 'sample'} {_some(samples)} of the batch{of_dataset} {'trigger' if several else 'triggers'} it"

    def _evidence(self, operation: str, phase: str) -> dict[str, float | str]:
        data = self.data
        found: dict[str, float | str] = {}
        if data.get("source"):
            found |= {"source": str(data["source"]), "source_text": str(data.get("text", ""))}
        found |= {"operation": operation, "phase": phase, "key": str(data.get("key", ""))}
        for seen in [*(data.get("inputs") or ())][:MAX_INPUTS]:
            if not str(seen.get("name", "")).startswith("backward "):
                found[f"given {seen.get('name', '')}".strip()] = _range(seen)
        if data.get("parameters"):
            found["parameters"] = _some(data["parameters"])
        if data.get("samples"):
            found["samples"] = _some(data["samples"])
        if data.get("capsule"):
            found["capsule"] = str(data["capsule"])
        for number, caveat in enumerate(_strings(data.get("caveats"))[:3], 1):
            found[f"note {number}"] = caveat
        return found


def _range(seen: Mapping[str, Any]) -> str:
    bad = [f"{seen.get(name)} {name}" for name in ("zeros", "nan", "inf") if seen.get(name)]
    shape = "x".join(map(str, seen.get("shape") or ())) or "scalar"
    return ", ".join([f"{shape} {seen.get('dtype', '')}, {float(seen.get('low', 0)):.4g} to {float(seen.get('high', 0)):.4g}", *bad])


def _some(values: Sequence[Any]) -> str:
    shown = ", ".join(str(value) for value in values[:MAX_SAID])
    return f"{shown} and {len(values) - MAX_SAID} more" if len(values) > MAX_SAID else shown


def _strings(values: Any) -> list[str]:
    return [str(value) for value in values or ()]


@dataclass(slots=True)
class OfAnOrigin:
    """What the rules for defects that `KEYS` lists have in common: all but their names and their pages."""

    name: ClassVar[str]
    explains: ClassVar[tuple[str, ...]] = FOLLOWS

    origins: Origins = field(default_factory=Origins)

    def see(self, step: Step) -> None:
        self.origins.see(step)

    def answer(self) -> Answer:
        return self.origins.answer(self.name, KEYS[self.name])
