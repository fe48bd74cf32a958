"""The verdict of a comparison in sentences: the outcome first, then where it comes from.

Runs are *identical* if no measured number differs, *alike* if numbers differ but results agree within their noise, else *different*.
"""

from collections.abc import Sequence
from typing import Literal

from sonde.comparison.finding_changes import ChangedFinding, FindingChanges
from sonde.comparison.first_divergence import SCALAR, Difference, FirstDivergence
from sonde.comparison.loss_curves import LossComparison
from sonde.comparison.settings_differences import SettingDifference
from sonde.comparison.speed_and_memory import Change, SpeedAndMemory
from sonde.events import Kind, Severity
from sonde.formatting import layer_name, listing, number
from sonde.report import Report, RunFacts

Verdict = Literal["identical", "alike", "different", "unknown"]

NORMAL_ENDINGS = ("finished", "exit", "running", "interrupted", "unknown")  # exit: with the exit code 0
MOST_DIGITS = 17  # two different doubles differ within so many
PLACES = {
    Kind.PARAMETER: "the parameter {}",
    Kind.BATCH: "the data {}",
    Kind.ACTIVATION: "the output of {}",
    Kind.ACTIVATION_GRADIENT: "the gradient at the output of {}",
    Kind.GRADIENT: "the gradient of {}",
    Kind.UPDATE: "the update of {}",
}
SCALARS = {"loss": "the loss", "lr": "the learning rate", "grad_norm": "the norm of the gradients", "loss_scale": "the scale of the loss"}


def judge_comparison(
    reports: tuple[Report, Report],
    divergence: FirstDivergence | None,
    losses: Sequence[LossComparison],
    speed_and_memory: SpeedAndMemory | None,
    findings: FindingChanges,
    settings: Sequence[SettingDifference],
) -> tuple[Verdict, str, tuple[str, ...]]:
    """The verdict, its sentence, and further sentences."""
    outcomes = [*_endings(reports), *(text for one in losses if (text := _loss(one)))]
    causes = [text for text in (_found(findings.new, "A", reports[1]), _found(findings.gone, "B", reports[0])) if text]
    diverged = [divergence_sentence(divergence)] if divergence else []
    speed = _speed_sentences(speed_and_memory)
    agreement = _agreement(losses)
    if divergence is None and not outcomes:
        lacking = [name for name, report in zip("AB", reports) if not report.run.num_steps]
        why = f"{' and '.join(lacking)} has no complete step" if lacking else "no step has the same number in both"
        return "unknown", f"Nothing can be compared: {why}.", tuple(causes)
    sources = _sources(divergence, settings)
    if causes and findings.num_changes:
        return "different", causes[0], (*causes[1:], *(outcomes or agreement), *diverged, *sources, *speed)
    if outcomes:
        return "different", outcomes[0], (*outcomes[1:], *causes, *diverged, *sources, *speed)
    assert divergence is not None
    first = divergence.first
    if first is not None and divergence.meant_to_be_same and not first.by_rounding:
        return "different", diverged[0], (*sources, *agreement, *causes, *speed)
    if speed:
        same = "no measured number differs" if first is None else "the losses agree within their noise"
        return "different", f"{speed[0].rstrip('.')}; {same}.", (*speed[1:], *(diverged if first is not None else ()), *causes)
    if first is None:
        return "identical", diverged[0], tuple(causes)
    return "alike", (agreement or ["No difference is beyond the noise of these runs."])[0], (*diverged, *causes)


def _endings(reports: tuple[Report, Report]) -> list[str]:
    a, b = (report.run for report in reports)
    if _has_ended_normally(a) == _has_ended_normally(b):
        return []
    name, failed, other = ("B", b, "A") if _has_ended_normally(a) else ("A", a, "B")
    how = f"left with exit code {failed.exit_code}" if failed.ended == "exit" else f"ended by {failed.exception or 'an exception'}"
    return [f"{name} {'was killed' if failed.ended == 'killed' else how} after step {failed.last_step}; {other} did not."]


def _has_ended_normally(run: RunFacts) -> bool:
    return run.ended in NORMAL_ENDINGS and not (run.ended == "exit" and run.exit_code)


def _loss(one: LossComparison) -> str:
    a, b = distinct_numbers(one.equal_step_a.value, one.equal_step_b.value)
    at = f"at step {one.equal_step_b.step}"
    if one.side in ("higher", "lower"):
        return f"B's {one.series} ends {one.side}: {b} against {a} {at}, outside of A's band from step {one.left_step} to the end."
    if one.side == "not finite":
        return f"B's {one.series} is not finite from step {one.first_bad_b} on; A's is {a} {at}."
    if one.side == "finite":
        return f"A's {one.series} is not finite from step {one.first_bad_a} on; B's is {b} {at}."
    if (one.first_bad_a < 0) != (one.first_bad_b < 0):
        name, step = ("B", one.first_bad_b) if one.first_bad_a < 0 else ("A", one.first_bad_a)
        return f"The {one.series} of {name} is not finite at step {step}; that of the other always is."
    return ""


def _agreement(losses: Sequence[LossComparison]) -> list[str]:
    known = next((one for one in losses if one.side == "same"), None)
    if known is None:
        return []
    a, b = distinct_numbers(known.equal_step_a.value, known.equal_step_b.value)
    return [f"The losses agree within their noise: {a} and {b} at step {known.equal_step_a.step}."]


def _found(changed: Sequence[ChangedFinding], other: str, report: Report) -> str:
    """Without consequences: they come and go with their causes."""
    causes = [one for one in changed if "consequence_of" not in one.finding.evidence and one.finding.severity.rank >= Severity.WARNING.rank]
    if not causes:
        return ""
    places = {one.finding.where: layer_name(one.finding.where, report.run.layer_types.get(one.finding.where, "")) for one in causes}
    names = listing([one.finding.rule + (f" in {places[one.finding.where]}" if one.finding.where else "") for one in causes])
    not_evaluated = [one.finding.rule for one in causes if not one.evaluated_in_other]
    doubt = f" ({listing(not_evaluated)} could not be evaluated in {other})" if not_evaluated else ""
    return f"Found in {'B' if other == 'A' else 'A'} and not in {other}: {names}{doubt}."


def divergence_sentence(divergence: FirstDivergence) -> str:
    """Up to which step the numbers are the same, and what differs first."""
    first, nearest = divergence.first, divergence.nearest
    if first is None:
        return f"No measured number differs in {divergence.num_common} steps, {divergence.num_both_observed} of them observed in both."
    if divergence.from_the_start:
        return f"The numbers differ from the start: {divergence.meaning}."
    since = f"The same numbers up to step {divergence.last_equal_step}; in" if divergence.last_equal_step >= 0 else "Already in"
    sentence = f"{since} step {first.step} {place_text(first)} differs first ({values_text(first)}): {divergence.meaning}."
    if nearest is None:
        return sentence
    return f"{sentence} In the next step that both observed, {nearest.step}, {place_text(nearest)} differs first."


def place_text(one: Difference) -> str:
    """`the output of encoder.2`, `the learning rate`."""
    if one.kind == SCALAR:
        series = one.where.partition(":")[0]
        return SCALARS.get(one.where) or f"{SCALARS.get(series, series)} {one.where}"
    return PLACES.get(one.kind, one.kind + " {}").format(layer_name(one.where, one.type))


def values_text(one: Difference) -> str:
    """`mean 0.12 against 0.13`."""
    if one.statistic == "hash":
        return "other content"
    a, b = distinct_numbers(one.a, one.b)
    return f"{a} against {b}" if one.kind == SCALAR else f"{one.statistic} {a} against {b}"


def _sources(divergence: FirstDivergence | None, settings: Sequence[SettingDifference]) -> list[str]:
    """Different settings are the most likely source of different results."""
    given = [f"{one.name} {one.a} against {one.b}" for one in settings if one.topic in ("configuration", "model", "loop")]
    if given:
        return [f"Their settings differ: {listing(given)}."]
    has_diverged = divergence is not None and divergence.first is not None and not divergence.from_the_start
    return ["Nothing that was recorded of their configuration differs."] if has_diverged else []


def _speed_sentences(compared: SpeedAndMemory | None) -> list[str]:
    if compared is None:
        return []
    sentences = []
    step = compared.step
    if step is not None and step.direction in ("more", "less"):
        a, b = (_duration(spread.median) for spread in (step.a, step.b) if spread is not None)
        how = "slower" if step.direction == "more" else "faster"
        sentences.append(f"A step of B is {times_larger(step.ratio)} {how} ({b} against {a}){_changed_phases(compared, step)}.")
    for change in compared.memory:
        if change.direction in ("more", "less"):
            how = "as much" if change.direction == "more" else "less"
            sentences.append(f"B takes {times_larger(change.ratio)} {how} memory ({change.name}).")
    return sentences


def _changed_phases(compared: SpeedAndMemory, step: Change) -> str:
    """The phases that changed in the same direction, the largest change first."""
    directions = {"more": ("more", "only in B"), "less": ("less", "only in A")}[step.direction]
    phases = [change for change in compared.times if change is not step]
    moved = [change for change in phases if change.direction in directions]
    if len(moved) > 1 and all(change in moved or change.direction in ("unknown", "unclear", "slight") for change in phases):
        return ", in every phase: which another machine, its load or its threads would do as well"
    moved.sort(key=lambda change: -abs((change.b.median if change.b else 0.0) - (change.a.median if change.a else 0.0)))
    return f", in {listing([change.name for change in moved])}" if moved else ""


# ---- two numbers in a sentence


def distinct_numbers(a: float, b: float) -> tuple[str, str]:
    """Both as text, with as many digits as it takes to distinguish them."""
    texts = number(a), number(b)
    digits = 3
    while texts[0] == texts[1] and a != b and not (a != a and b != b) and digits < MOST_DIGITS:
        digits += 1
        texts = f"{a:.{digits}g}", f"{b:.{digits}g}"
    return texts


def times_larger(ratio: float) -> str:
    """`1.8 times`: the larger over the smaller."""
    return f"{number(max(ratio, 1 / ratio))} times" if ratio > 0 else "many times"


def _duration(ms: float) -> str:
    return f"{float(number(ms)):,.0f} ms" if 1000 <= ms < 1e6 else f"{number(ms)} ms"
