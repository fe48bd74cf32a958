"""The finding of the rules about spikes: which samples make a spike, what followed, what to do."""

from collections.abc import Sequence

from sonde.events import Finding, SpikeDetected
from sonde.formatting import layer_name, listing, number
from sonde.rules._shared.clipping_advice import Clipping
from sonde.rules._shared.origin_search_results import NONFINITE_RULES
from sonde.rules._shared.read_event_tables import amount, text
from sonde.rules._shared.spikes_in_run import ODD_INPUT, RETURNS, ObservedSpike, SpikeHistory
from sonde.rules.rule import Clear, NotEvaluated, Result
from sonde.run_view import RunView
from sonde.run_view.source_lines_of_calls import source_evidence

MAX_SHOWN = 5  # samples in a sentence
CONSEQUENCES_OF_SPIKES = (
    "lr-divergence", "exploding-gradient", *NONFINITE_RULES, "loss-plateau", "dead-relu", "vanishing-gradient", "unchanged-parameter",
)  # fmt: skip
"""What a training ends in if one batch has undone it."""


def check_spikes(view: RunView, *, rule: str, what: str) -> Result:
    """The result of the rule about spikes of the "loss" or of the "gradient"."""
    history = SpikeHistory.of(view, what)
    if not history.num:
        return NotEvaluated(history.reason_not_evaluated) if history.reason_not_evaluated else Clear()
    worst = history.worst
    layer = history.layer(view, worst)
    thing = "loss" if what == "loss" else "gradient norm"
    at = f" at {worst.event.source}" if worst.event and worst.event.source else ""
    parts = [
        f"the {thing}{at} jumped to {number(worst.spike.value)}, where {number(worst.spike.usual)} is usual",
        f"most of it in {view.layer_name(layer)}" if layer and what == "gradient" else "",
        _reason(worst, thing),
        _aftermath(view, history, worst),
    ]
    return [
        Finding(
            rule=rule,
            severity=history.severity(view.loss_trend.failing),
            where=layer,
            step=worst.step,
            cause="; ".join(part for part in parts if part),
            fix=_fix(worst, view.remember(Clipping.of)),
            evidence=_evidence(history, worst),
        )
    ]


def _reason(spike: ObservedSpike, thing: str) -> str:
    """What makes the spike; empty if that is not known."""
    event = spike.event
    if spike.is_replaced:
        return "parameters of the model were replaced around this step by others, which are not trained yet"
    if event is not None and spike.samples:
        return _samples_text(event, spike.samples, thing)
    if spike.input_factor >= ODD_INPUT:
        return f"the inputs of this batch are up to {number(spike.input_factor)} times as large as those of others"
    if spike.has_rate_risen:
        return f"the learning rate is {number(spike.rate)}, after {number(spike.usual_rate)} before"
    if event is not None and event.blame == "update":
        return "the batch is the same as in the step before, so the last update caused it"
    return "it is spread over the whole batch" if event is not None and event.samples is not None else ""


def _samples_text(event: SpikeDetected, samples: Sequence[int], thing: str) -> str:
    is_plural = len(samples) > 1
    of_dataset = f" (item{'s' if is_plural else ''} {_some(event.indices)} of the dataset)" if event.indices else ""
    subject = f"{'samples' if is_plural else 'sample'} {_some(samples)} of the batch{of_dataset}"
    share = min(100, round(100 * sum(event.shares)))
    without = event.value_without_samples
    parts = [
        f"{'make' if is_plural else 'makes'} up {share} % of the excess" if event.shares else "",
        _deviation(event),
        f"without {'them' if is_plural else 'it'} the {thing} is {number(without)}" if without is not None else "",
    ]
    details = "; ".join(part for part in parts if part)
    return f"{subject} {details}" if event.shares else f"{subject} {'stand' if is_plural else 'stands'} out: {details}"


def _deviation(event: SpikeDetected) -> str:
    """In which input, target or output the samples differ from the others."""
    odd = event.deviation or {}
    others = amount(odd, "others")
    times = f"{number(amount(odd, 'size') / others)} times" if others else "far above"
    if event.blame in ("input", "target") and odd:
        return f"{text(odd, 'name')} there is {times} that of the others"
    if event.blame == "layer" and odd:
        return f"the output of {layer_name(text(odd, 'name'))} there is {times} that of the others"
    conclusion = {"target": ", so the label is unusual", "slope": ", but the slope is steep"}.get(event.blame)
    return f"inputs and outputs there are like those of the others{conclusion}" if conclusion else ""


def _aftermath(view: RunView, history: SpikeHistory, spike: ObservedSpike) -> str:
    if spike.is_lost:
        return view.loss_trend.failing or f"in {spike.num_after} steps since, the loss has not come back"
    times = f"it happens {history.num} times in this run" if history.num > 1 else ""
    back = "the loss came back" if spike.num_back >= RETURNS else ""
    return "; ".join(part for part in (times, back) if part)


def _fix(spike: ObservedSpike, clipping: Clipping) -> str:
    event = spike.event
    if spike.is_replaced:
        return "build the optimizer after the last change to the model, so that it trains the new parameters"
    if event is not None and spike.samples:
        item = "these items" if len(spike.samples) > 1 else "this item"
        target = text(event.deviation or {}, "name") or "the label"
        inspect = {
            "input": f"inspect {item}: units, scale, a damaged file; clean or clip the inputs",
            "target": f"inspect {target} of {item}; correct it or leave it out",
            "layer": f"inspect {item}: the model has not learned values like these",
            "slope": f"inspect the arithmetic of the loss for {item}: a division by a small number, a root or a norm near zero",
        }.get(event.blame, f"inspect {item}")
        return f"{inspect}, and {clipping.advice}, so that one sample cannot undo the training"
    if spike.input_factor >= ODD_INPUT:
        return f"check how this batch was loaded and normalized; {clipping.advice}, so that one batch cannot undo the training"
    if spike.has_rate_risen:
        return "let the learning rate rise more slowly, or to a lower value"
    return f"if it harms, {clipping.advice}, or lower the learning rate"


def _evidence(history: SpikeHistory, chosen: ObservedSpike) -> dict[str, float | str]:
    event, spike = chosen.event, chosen.spike
    found: dict[str, float | str] = source_evidence(event.source, event.text) if event else {}
    found |= {"value": spike.value, "usual": spike.usual, "usual_high": spike.high, "num_leaps": history.num}
    if chosen.is_replaced:
        found["blame"] = "replaced parameters"
    elif event is not None:
        found |= {"samples": _some(event.samples)} if event.samples else {}
        found |= {"indices": _some(event.indices)} if event.indices else {}
        found |= {"blame": event.blame} if event.blame else {}
    if history.num > 1:
        found["steps"] = _some([each.step for each in history.spikes])
    caveats = event.caveats[:3] if event else ()
    return found | {f"note {num}": caveat for num, caveat in enumerate(caveats, 1)}


def _some(values: Sequence[int]) -> str:
    return listing([str(value) for value in values], MAX_SHOWN)
