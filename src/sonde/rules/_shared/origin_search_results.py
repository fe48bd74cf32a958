"""What the search for the origin of a NaN or Inf found, for the rules that report it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sonde.events import Finding, Kind, OriginFound, OriginUnknown, Severity
from sonde.formatting import listing
from sonde.rules._shared.magnitude_history import MagnitudeHistory
from sonde.rules._shared.read_event_tables import amount, count, text
from sonde.run_view import RunView
from sonde.run_view.source_lines_of_calls import source_evidence

OPERATION_DEFECTS = {  # rule -> keys of an origin
    "unstable-softmax": ("unstable-softmax",),
    "nan-grad-sqrt-zero": ("sqrt-at-zero", "norm-at-zero"),
    "nan-grad-where": ("nan-grad-where",),
    "all-targets-ignored": ("all-targets-ignored",),
    "fp16-overflow": ("fp16-overflow",),
}
NONFINITE_RULES = ("nonfinite-loss", "nonfinite-origin", "nonfinite-evaluation", *OPERATION_DEFECTS)
"""Rules that report a NaN or Inf: for rules that know what led to it."""

CONSEQUENCES = (
    "nonfinite-loss", "lr-divergence", "exploding-gradient", "vanishing-gradient", "dead-relu", "loss-plateau", "unchanged-parameter",
    "loss-scale-collapse", "loss-spike", "gradient-spike", "nonfinite-evaluation",
)  # fmt: skip
"""What a NaN or Inf leads to. Divergence may also lead to a NaN: the earlier one is the cause."""

EVALUATION = "evaluation"  # what was not finite: not the training's own loss or gradient
MAX_SAMPLES = 8  # in a sentence
MAX_INPUTS = 4  # tensors among the evidence
MAX_HISTORIES = 3  # tensors whose history is shown


@dataclass(frozen=True, slots=True)
class OriginEvents:
    """The first origin that was found in the training or in its evaluations."""

    origin: OriginFound | None
    reason_unknown: str  # of the first search that found none; empty if there was none
    histories: Sequence[MagnitudeHistory] = ()  # of the tensors that are involved, up to the step of the origin

    def finding(self, rule: str, severity: Severity) -> Finding:
        origin = self.origin
        assert origin is not None  # its caller checked
        value = "NaN" if origin.value_kind == "nan" else "Inf"
        at = f" at {origin.source}" if origin.source else ""
        if origin.phase in ("forward", "backward"):
            what = f"{'the backward of ' if origin.phase == 'backward' else ''}{origin.operation} made the first {value}{at}"
        else:
            what = f"{'an' if origin.phase == 'input' else 'a'} {origin.phase} held {value} already when {origin.operation} used it{at}"
        when = f"in evaluation, at step {origin.step}, " if origin.what == EVALUATION else ""
        growth = next((f"; {history.growth}" for history in self.histories if history.growth), "")
        return Finding(
            rule=rule,
            severity=severity,
            where=origin.parameters[0] if origin.phase == "parameter" and origin.parameters else origin.module,
            step=origin.step,
            cause=f"{when}{what}: {origin.cause}{growth}{_responsible_samples(origin)}",
            fix=origin.fix,
            evidence=self._evidence(origin),
        )

    def _evidence(self, origin: OriginFound) -> dict[str, float | str]:
        found = source_evidence(origin.source, origin.text)
        found |= {"operation": origin.operation, "phase": origin.phase, "key": origin.key}
        for tensor in origin.inputs[:MAX_INPUTS]:
            if not text(tensor, "name").startswith("backward "):
                found[f"given {text(tensor, 'name')}".strip()] = _range(tensor)
        for num, history in enumerate(self.histories, 1):
            found["largest" if num == 1 else f"largest {num}"] = str(history)
        if origin.parameters:
            found["parameters"] = listing(origin.parameters, MAX_SAMPLES)
        if origin.samples:
            found["samples"] = _samples(origin.samples)
        if origin.capsule:
            found["capsule"] = origin.capsule
        return found | {f"note {num}": caveat for num, caveat in enumerate(origin.caveats[:3], 1)}


def training_origin(view: RunView) -> OriginEvents:
    """The origin of the first NaN or Inf of the training."""
    return _search(view, is_evaluation=False)


def evaluation_origin(view: RunView) -> OriginEvents:
    """The origin of the first NaN or Inf in an evaluation."""
    return _search(view, is_evaluation=True)


def _search(view: RunView, *, is_evaluation: bool) -> OriginEvents:
    found = [event for _, event in view.events_with_rows(OriginFound) if (event.what == EVALUATION) == is_evaluation]
    failed = [event for _, event in view.events_with_rows(OriginUnknown) if (event.what == EVALUATION) == is_evaluation]
    origin = found[0] if found else None
    reason = next((event.reason for event in failed if event.reason), "")
    return OriginEvents(origin, reason, _histories(view, origin) if origin else ())


def _histories(view: RunView, origin: OriginFound) -> list[MagnitudeHistory]:
    """Of a gradient that is not finite, of the operation's input (as far as it was measured), of its output and of its weights."""
    sizes = {str(path): float(size) for path, size in origin.sizes}

    def history(kind: str, name: str) -> MagnitudeHistory | None:
        size = sizes.get(name) if kind == Kind.ACTIVATION else None
        return MagnitudeHistory.of(view, kind, name, step=origin.step, magnitude_now=size)

    given = next((found for name in origin.after if (found := history(Kind.ACTIVATION, name)) is not None), None)
    others = [(Kind.ACTIVATION, origin.module), *((Kind.PARAMETER, name) for name in origin.parameters)]
    if origin.what == "gradient":
        others.insert(0, (Kind.GRADIENT, origin.where))
    shown = {given.name: given} if given else {}
    for kind, name in others:
        found = history(kind, name) if name and len(shown) < MAX_HISTORIES else None
        if found is not None:
            shown.setdefault(found.name, found)
    return list(shown.values())


def _responsible_samples(origin: OriginFound) -> str:
    samples = origin.samples
    if not samples:
        return "" if samples is None else "; it takes the whole batch"
    is_plural = len(samples) > 1
    of_dataset = f" (item{'s' if is_plural else ''} {_samples(origin.indices)} of the dataset)" if origin.indices else ""
    verb = "trigger" if is_plural else "triggers"
    return f"; {'samples' if is_plural else 'sample'} {_samples(samples)} of the batch{of_dataset} {verb} it"


def _samples(indices: Sequence[int]) -> str:
    return listing([str(index) for index in indices], MAX_SAMPLES)


def _range(tensor: Mapping[str, Any]) -> str:
    """`32x10 float32, -1.2 to 3.4, 2 zeros, 1 NaN`."""
    shape = "x".join(map(str, tensor.get("shape") or ())) or "scalar"
    zeros, nan, inf = (count(tensor, name) for name in ("zeros", "nan", "inf"))
    counts = [f"{zeros:,} zero{'s' if zeros > 1 else ''}"] if zeros else []
    counts += [f"{num:,} {name}" for num, name in ((nan, "NaN"), (inf, "Inf")) if num]
    return ", ".join([f"{shape} {text(tensor, 'dtype')}, {amount(tensor, 'low'):.4g} to {amount(tensor, 'high'):.4g}", *counts])
