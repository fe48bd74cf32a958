"""What of all differences is worth telling, in sentences: the outcome and its root first.

Runs are *identical* where no measured number differs, *alike* where numbers differ but nothing else does beyond its noise, and *different*
where something does that a person would want to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sonde.comparison.curves import LossComparison
from sonde.comparison.findings import FindingComparison, FoundIn
from sonde.comparison.pace import Change, Pace
from sonde.comparison.parting import SCALAR, Difference, Parting
from sonde.comparison.settings import SettingDifference
from sonde.comparison.words import apart, duration, times
from sonde.events import Kind, Severity
from sonde.formatting import listing
from sonde.report import Report, RunFacts

Verdict = Literal["identical", "alike", "different", "unknown"]

WELL = ("finished", "exit", "running", "interrupted", "unknown")  # ends that are nobody's mistake, but for an exit code
PLACES = {
    Kind.PARAMETER: "the parameter {}",
    Kind.BATCH: "the data {}",
    Kind.ACTIVATION: "the output of {}",
    Kind.ACTIVATION_GRADIENT: "the gradient at the output of {}",
    Kind.GRADIENT: "the gradient of {}",
    Kind.UPDATE: "the update of {}",
}
SCALARS = {"loss": "the loss", "lr": "the learning rate", "grad_norm": "the norm of the gradients", "loss_scale": "the scale of the loss"}


def verdict_on(
    reports: tuple[Report, Report],
    parting: Parting | None,
    losses: Sequence[LossComparison],
    pace: Pace | None,
    findings: FindingComparison,
    settings: Sequence[SettingDifference],
) -> tuple[Verdict, str, tuple[str, ...]]:
    """The verdict, its sentence, and further ones."""
    outcomes = [*_endings(reports), *(text for one in losses if (text := _loss(one)))]
    causes = [text for text in (_found(findings.new, "A"), _found(findings.gone, "B")) if text]
    parted = [parting_sentence(parting)] if parting else []
    speed = [*_speed(pace)]
    happened = parting is not None and parting.first is not None and parting.meant_to_be_same and not parting.first.by_rounding
    if parting is None and not outcomes:
        lacking = [name for name, report in zip("AB", reports) if not report.run.num_steps]
        why = f"{' and '.join(lacking)} has no complete step" if lacking else "no step has the same number in both"
        return "unknown", f"Nothing can be compared: {why}.", tuple(causes)
    if causes and findings.num_changes:
        return "different", causes[0], (*causes[1:], *(outcomes or _agreement(losses)), *parted, *_roots(parting, settings), *speed)
    if outcomes:
        return "different", outcomes[0], (*outcomes[1:], *causes, *parted, *_roots(parting, settings), *speed)
    assert parting is not None
    if happened:
        return "different", parted[0], (*_roots(parting, settings), *_agreement(losses), *causes, *speed)
    numbers = "identical" if parting.first is None else "alike"
    if speed:
        same = "no measured number differs" if numbers == "identical" else "the losses agree within their noise"
        return "different", f"{speed[0].rstrip('.')}; {same}.", (*speed[1:], *(parted if numbers == "alike" else ()), *causes)
    if numbers == "identical":
        return "identical", parted[0], tuple(causes)
    agreement = _agreement(losses)
    return "alike", (agreement or ["No difference is beyond the noise of these runs."])[0], (*parted, *causes)


def _endings(reports: tuple[Report, Report]) -> list[str]:
    a, b = (report.run for report in reports)
    if _well(a) == _well(b):
        return []
    name, broken, sound = ("B", b, "A") if _well(a) else ("A", a, "B")
    return [f"{name} {_broke(broken)} after step {broken.last_step}; {sound} did not."]


def _broke(run: RunFacts) -> str:
    if run.ended == "killed":
        return "was killed"
    return f"left with exit code {run.exit_code}" if run.ended == "exit" else f"ended by {run.exception or 'an exception'}"


def _well(run: RunFacts) -> bool:
    return run.ended in WELL and not (run.ended == "exit" and run.exit_code)


def _loss(one: LossComparison) -> str:
    name = "loss" if one.series == "loss" else one.series
    a, b = apart(one.equal_step_a.value, one.equal_step_b.value)
    at = f"at step {one.equal_step_b.step}"
    if one.side in ("higher", "lower"):
        since = f"outside of A's band from step {one.left_step} to the end"
        return f"B's {name} ends {one.side}: {b} against {a} {at}, {since}."
    if one.side == "not finite":
        return f"B's {name} is not finite from step {one.first_bad_b} on; A's is {a} {at}."
    if one.side == "finite":
        return f"A's {name} is not finite from step {one.first_bad_a} on; B's is {b} {at}."
    if (one.first_bad_a < 0) != (one.first_bad_b < 0):
        name_of, step = ("B", one.first_bad_b) if one.first_bad_a < 0 else ("A", one.first_bad_a)
        return f"The {name} of {name_of} is not finite at step {step}; that of the other always is."
    return ""


def _agreement(losses: Sequence[LossComparison]) -> list[str]:
    known = [one for one in losses if one.side == "same"]
    if not known:
        return []
    a, b = apart(known[0].equal_step_a.value, known[0].equal_step_b.value)
    return [f"The losses agree within their noise: {a} and {b} at step {known[0].equal_step_a.step}."]


def _found(some: Sequence[FoundIn], other: str) -> str:
    """Roots alone: what follows from them goes with them."""
    roots = [one for one in some if "consequence_of" not in one.finding.evidence and one.finding.severity.rank >= Severity.WARNING.rank]
    if not roots:
        return ""
    names = listing([one.finding.rule + (f" in {one.finding.where}" if one.finding.where else "") for one in roots])
    here = "B" if other == "A" else "A"
    doubtful = [one.finding.rule for one in roots if not one.evaluated_in_other]
    doubt = f" ({listing(doubtful)} could not be evaluated in {other})" if doubtful else ""
    return f"Found in {here} and not in {other}: {names}{doubt}."


def parting_sentence(parting: Parting) -> str:
    """Up to where the numbers are the same, and what differs first."""
    first = parting.first
    if first is None:
        return f"No measured number differs in {parting.num_common} steps, {parting.num_both_observed} of them observed in both."
    if parting.from_the_start:
        return f"The numbers differ from the start: {parting.meaning}."
    what = difference_words(first)
    since = f"The same numbers up to step {parting.last_equal_step}; in" if parting.last_equal_step >= 0 else "Already in"
    head = f"{since} step {first.step} {what} differs first"
    place = f" ({number_pair(first)}): {parting.meaning}."
    near = ""
    if parting.nearest is not None:
        near = f" In the next step that both observed, {parting.nearest.step}, {difference_words(parting.nearest)} differs first."
    return head + place + near


def difference_words(one: Difference) -> str:
    """`the output of encoder.2`, `the learning rate`."""
    if one.kind == SCALAR:
        series = one.where.partition(":")[0]
        return SCALARS.get(one.where) or f"{SCALARS.get(series, series)} {one.where}"
    return PLACES.get(one.kind, one.kind + " {}").format(one.where)


def number_pair(one: Difference) -> str:
    """`mean 0.12 against 0.13`."""
    if one.statistic == "hash":
        return "other content"
    a, b = apart(one.a, one.b)
    return f"{a} against {b}" if one.kind == SCALAR else f"{one.statistic} {a} against {b}"


def _roots(parting: Parting | None, settings: Sequence[SettingDifference]) -> list[str]:
    """What was given differently is the first suspect for what came out differently."""
    given = [f"{one.name} {one.a} against {one.b}" for one in settings if one.topic in ("configuration", "model", "loop")]
    if not given:
        same = parting is not None and parting.first is not None and not parting.from_the_start
        return ["Nothing that was recorded of their configuration differs."] if same else []
    return [f"They were given: {listing(given)}."]


def _speed(pace: Pace | None) -> list[str]:
    if pace is None:
        return []
    told = []
    step = pace.step
    if step is not None and step.direction in ("more", "less"):
        a, b = (duration(spread.median) for spread in (step.a, step.b) if spread is not None)
        how = "slower" if step.direction == "more" else "faster"
        told.append(f"A step of B is {times(step.ratio)} {how} ({b} against {a}){_where(pace, step)}.")
    for change in pace.memory:
        if change.direction in ("more", "less"):
            told.append(f"B takes {times(change.ratio)} {'as much' if change.direction == 'more' else 'less'} memory ({change.name}).")
    return told


def _where(pace: Pace, step: Change) -> str:
    """The phases that went the same way, those that make most of it first."""
    ways = {"more": ("more", "only in B"), "less": ("less", "only in A")}[step.direction]
    moved = [change for change in pace.times if change is not step and change.direction in ways]
    others = [change for change in pace.times if change is not step and change not in moved]
    if len(moved) > 1 and all(change.direction in ("unknown", "unclear", "slight") for change in others):
        return ", in every phase: which another machine, its load or its threads would do as well"
    moved.sort(key=lambda change: -abs((change.b.median if change.b else 0.0) - (change.a.median if change.a else 0.0)))
    return f", in {listing([change.name for change in moved])}" if moved else ""
