"""What the look back found: the first bad number of a run and where it was made. Several rules read it, each for its own defects."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from sonde.events import Finding, Kind, Severity, Step
from sonde.rules.activity import count
from sonde.rules.history import Course, MagnitudeHistory
from sonde.rules.rule import Answer, Clear, NotEvaluated

FOLLOWS = (
    "nonfinite-loss", "lr-divergence", "exploding-gradient", "vanishing-gradient", "dead-relu", "loss-plateau", "unchanged-parameter",
    "loss-scale-collapse", "loss-spike", "gradient-spike", "nonfinite-evaluation",
)  # fmt: skip
"""What a bad number leads to. Divergence may also lead to a bad number: whichever came first is the cause."""

KEYS = {  # defects that have rules of their own
    "unstable-softmax": ("unstable-softmax",),
    "nan-grad-sqrt-zero": ("sqrt-at-zero", "norm-at-zero"),
    "nan-grad-where": ("nan-grad-where",),
    "all-targets-ignored": ("all-targets-ignored",),
    "fp16-overflow": ("fp16-overflow",),
}
BAD_NUMBERS = ("nonfinite-loss", "nonfinite-origin", "nonfinite-evaluation", *KEYS)
"""Rules that speak of them: for those that know what led to it."""
MAX_SAID = 8  # samples in a sentence
MAX_INPUTS = 4  # tensors among the evidence
MAX_COURSES = 3  # tensors whose history is shown
EVALUATION = "evaluation"  # what was bad: not the training's own loss or gradient


@dataclass(slots=True)
class Origins:
    """A fold: the first origin of the training, or of its evaluations, and why none was found where none was."""

    in_evaluation: bool = False
    step: int = -1
    data: Mapping[str, Any] = field(default_factory=dict)
    courses: Sequence[Course] = ()  # of the tensors that are involved, up to the step of the origin
    num_backwards: int = 0
    unknown: str = ""
    history: MagnitudeHistory = field(default_factory=MagnitudeHistory)

    def see(self, step: Step) -> None:
        self.num_backwards += count(step, "backwards")
        if self.step < 0:
            self.history.see(step)
        for event in step.events:
            if event.kind not in ("origin", "origin_unknown") or (event.data.get("what") == EVALUATION) != self.in_evaluation:
                continue
            if event.kind == "origin_unknown":
                self.unknown = self.unknown or str(event.data.get("reason", ""))
            elif self.step < 0:
                self.step, self.data = event.step, dict(event.data)
                self.courses = self._courses()
                self.history = MagnitudeHistory()

    def _courses(self) -> list[Course]:
        """Of what the operation was given, as far as it was measured; of what it put out; of the weights, and of a bad gradient."""
        data = self.data
        now = {str(path): float(size) for path, size in data.get("sizes") or ()}
        course = partial(self.history.course, now=now, at=self.step)
        given = next((found for name in _strings(data.get("after")) if (found := course(Kind.ACTIVATION, name)) is not None), None)
        others = [(Kind.ACTIVATION, str(data.get("module", ""))), *((Kind.PARAMETER, name) for name in _strings(data.get("parameters")))]
        if data.get("what") == "gradient":
            others.insert(0, (Kind.GRADIENT, str(data.get("bad", ""))))
        shown = [given, *(course(kind, name) for kind, name in others if name)]
        return list({one.name: one for one in shown if one is not None}.values())[:MAX_COURSES]

    def answer(self, rule: str, keys: Collection[str] | None = None) -> Answer:
        """A finding where the origin is one of these defects; without keys, where it is none that has a rule of its own."""
        if self.step < 0:
            if self.unknown and keys is None:
                return NotEvaluated(f"a number is not finite, and where it was made could not be found: {self.unknown}")
            return Clear() if self.num_backwards else NotEvaluated("no backward was seen")
        key = str(self.data.get("key", ""))
        mine = key in keys if keys is not None else not any(key in claimed for claimed in KEYS.values())
        return [self.finding(rule, Severity.CRITICAL)] if mine else Clear()

    def finding(self, rule: str, severity: Severity) -> Finding:
        data = self.data
        module, parameters = str(data.get("module", "")), _strings(data.get("parameters"))
        phase, operation = str(data.get("phase", "")), str(data.get("operation", ""))
        made = "NaN" if data.get("kind") == "nan" else "Inf"
        at = f" at {data['source']}" if data.get("source") else ""
        if phase in ("forward", "backward"):
            begins = f"{'the backward of ' if phase == 'backward' else ''}{operation} made the first {made}{at}"
        else:
            begins = f"{'an' if phase == 'input' else 'a'} {phase} held {made} already when {operation} used it{at}"
        when = f"in evaluation, at step {self.step}, " if self.in_evaluation else ""
        grown = next((f"; {course.growth}" for course in self.courses if course.growth), "")
        return Finding(
            rule=rule,
            severity=severity,
            where=next(iter(parameters), module) if phase == "parameter" else module,
            step=self.step,
            cause=f"{when}{begins}: {data.get('cause', '')}{grown}{self._blamed()}",
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
        for num, course in enumerate(self.courses, 1):
            found["largest" if num == 1 else f"largest {num}"] = str(course)
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
    bad = [f"{num:,} {what}" for name, what in (("zeros", "zero"), ("nan", "NaN"), ("inf", "Inf")) if (num := int(seen.get(name) or 0))]
    bad = [f"{each}s" if each.endswith("zero") and each != "1 zero" else each for each in bad]
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
