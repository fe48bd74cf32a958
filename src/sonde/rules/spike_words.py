"""How the rules of spikes speak: who carries a leap, what came of it, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sonde.events import Finding, Step
from sonde.rules.leaps import LR_ROSE, ODD_INPUT, RETURNS, Leaps, ObservedSpike
from sonde.rules.origins import BAD_NUMBERS
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.words import listing, number

MAX_SAID = 5  # samples in a sentence
UNDONE = (
    "lr-divergence", "exploding-gradient", *BAD_NUMBERS, "loss-plateau", "dead-relu", "vanishing-gradient", "unchanged-parameter",
)  # fmt: skip
"""What a training looks like that one batch has undone."""


@dataclass(slots=True)
class OfLeaps:
    """What the rules of spikes have in common: all but their names and their pages."""

    name: ClassVar[str]
    explains: ClassVar[tuple[str, ...]]
    what: ClassVar[str]  # "loss" | "gradient"

    leaps: Leaps = field(init=False)

    def __post_init__(self) -> None:
        self.leaps = Leaps(self.what)

    def see(self, step: Step) -> None:
        self.leaps.see(step)

    def answer(self) -> Answer:
        leaps = self.leaps
        if not leaps.seen:
            return NotEvaluated(leaps.reason_not_evaluated) if leaps.reason_not_evaluated else Clear()
        worst = leaps.worst()
        layer = leaps.layer(worst)
        at = f" at {worst.data['source']}" if worst.data.get("source") else ""
        told = f"the {_thing(leaps)}{at} leapt to {number(worst.leap.value)}, where {number(worst.leap.usual)} is usual"
        most = f"most of it in {layer}" if layer and self.what == "gradient" else ""
        return [
            Finding(
                rule=self.name,
                severity=leaps.severity(),
                where=layer,
                step=worst.step,
                cause="; ".join(part for part in (told, most, carried(leaps, worst), aftermath(leaps, worst)) if part),
                fix=fix(leaps, worst),
                evidence=evidence(leaps, worst),
            )
        ]


def _thing(leaps: Leaps) -> str:
    return "loss" if leaps.what == "loss" else "gradient norm"



def carried(leaps: Leaps, seen: ObservedSpike) -> str:
    """Who carries it, for the middle of a sentence; empty where that is not known."""
    data, samples = seen.data, seen.samples
    if samples:
        several = len(samples) > 1
        indices = data.get("indices")
        of_dataset = f" (item{'s' if several else ''} {_some(indices)} of the dataset)" if indices else ""
        said = f"{'samples' if several else 'sample'} {_some(samples)} of the batch{of_dataset}"
        shares, without = [float(share) for share in data.get("shares") or ()], data.get("without")
        made = f"{'make' if several else 'makes'} up {min(100, round(100 * sum(shares)))} % of the excess" if shares else ""
        rest = f"without {'them' if several else 'it'} the {_thing(leaps)} is {number(float(without))}" if without is not None else ""
        parts = [part for part in (made, _oddity(seen), rest) if part]
        return f"{said} {'; '.join(parts)}" if made else f"{said} {'stand' if several else 'stands'} out: {'; '.join(parts)}"
    factor = leaps.input_factor(seen)
    if factor >= ODD_INPUT:
        return f"the inputs of this batch are up to {number(factor)} times as large as those of others"
    usual, rate = seen.rate
    if rate > LR_ROSE * usual > 0:
        return f"the learning rate is {number(rate)}, after {number(usual)} before"
    if data.get("blame") == "update":
        return "the batch is the same as in the step before, so the last update caused it"
    return "it is spread over the whole batch" if data.get("samples") == [] else ""


def _oddity(seen: ObservedSpike) -> str:
    odd, blame = seen.data.get("odd") or {}, seen.data.get("blame")
    times = f"{number(float(odd['size']) / float(odd['others']))} times" if odd.get("others") else "far above"
    if blame in ("input", "target") and odd:
        return f"{odd.get('name')} there is {times} that of the others"
    if blame == "layer" and odd:
        return f"what {odd.get('name')} puts out there is {times} that of the others"
    alike = "inputs and outputs there are like those of the others"
    return f"{alike}, so the label is odd" if blame == "target" else f"{alike}, but the slope is steep" if blame == "slope" else ""


def aftermath(leaps: Leaps, seen: ObservedSpike) -> str:
    if leaps.is_lost(seen):
        return leaps.learning.failing or f"in {seen.num_after} steps since, the loss has not come back"
    times = f"it happens {leaps.num} times in this run" if leaps.num > 1 else ""
    back = "the loss came back" if seen.num_back >= RETURNS else ""
    return "; ".join(part for part in (times, back) if part)


def fix(leaps: Leaps, seen: ObservedSpike) -> str:
    blame = seen.data.get("blame")
    if seen.samples:
        item = "these items" if len(seen.samples) > 1 else "this item"
        target = (seen.data.get("odd") or {}).get("name", "the label")
        look = {"input": f"look at {item}: units, scale, a damaged file; clean or clip the inputs",
                "target": f"look at {target} of {item}; correct it or leave it out",
                "layer": f"look at {item}: the model meets values there that it has not learnt",
                "slope": f"look at what {item} meets in the loss: a division by little, a root or a norm near zero"}  # fmt: skip
        return f"{look.get(str(blame), f'look at {item}')}, and clip gradients so that one sample cannot undo the training"
    if leaps.input_factor(seen) >= ODD_INPUT:
        return "look at how this batch was loaded and normalised; clip gradients so that one batch cannot undo the training"
    if seen.rate[1] > LR_ROSE * seen.rate[0] > 0:
        return "let the learning rate rise more slowly, or to a lower value"
    return "if it harms, clip gradients (torch.nn.utils.clip_grad_norm_) or lower the learning rate"


def evidence(leaps: Leaps, seen: ObservedSpike) -> dict[str, float | str]:
    data, leap = seen.data, seen.leap
    found: dict[str, float | str] = {}
    if data.get("source"):
        found |= {"source": str(data["source"]), "source_text": str(data.get("text", ""))}
    found |= {"value": leap.value, "usual": leap.usual, "usual_high": leap.high, "num_leaps": leaps.num}
    if data.get("samples"):
        found["samples"] = _some(data["samples"])
    if data.get("indices"):
        found["indices"] = _some(data["indices"])
    if data.get("blame"):
        found["blame"] = str(data["blame"])
    if leaps.num > 1:
        found["steps"] = _some([each.step for each in leaps.seen])
    for place, caveat in enumerate([*(data.get("caveats") or ())][:3], 1):
        found[f"note {place}"] = str(caveat)
    return found


def _some(values: Sequence[Any]) -> str:
    return listing([str(value) for value in values], MAX_SAID)
