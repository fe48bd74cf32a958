"""Two runs side by side as tables of text, which the terminal, the page and Markdown draw each in its own way. Nothing is judged here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sonde.comparison.words import apart, times
from sonde.rules.words import listing, number
from sonde.views.facts import ending
from sonde.views.numbers import counted
from sonde.views.quantities import NOTHING, large, milliseconds

if TYPE_CHECKING:
    from sonde.comparison.compare import RunComparison
    from sonde.comparison.curves import Level, LossComparison
    from sonde.comparison.findings import FindingComparison
    from sonde.comparison.pace import Change, Spread
    from sonde.comparison.parting import Parting
    from sonde.events import Finding

TOO_FEW = "too few steps to tell"
SIDES = {
    "higher": "B is higher",
    "lower": "B is lower",
    "same": "within A's band",
    "not finite": "B is not finite",
    "finite": "A is not finite",
    "unknown": TOO_FEW,
}
UNCHANGED = {"same": "unchanged", "slight": "too little to matter", "unclear": "within the spread", "unknown": TOO_FEW}
MAX_LISTED = 6  # layers that only one run has: more are counted


@dataclass(frozen=True, slots=True)
class ComparisonTable:
    """Rows of four texts: what, in A, in B, and what to make of it."""

    title: str
    rows: tuple[tuple[str, str, str, str], ...]
    bad: frozenset[int] = frozenset()  # rows that say something


def tables(comparison: RunComparison) -> list[ComparisonTable]:
    """Everything that is drawn below the verdict; what has nothing to say is left out."""
    found = [
        ComparisonTable("Runs", tuple(_runs(comparison))),
        *(_loss(one) for one in comparison.losses),
        _made("Time", list(_times(comparison)), ("slower", "faster", "only in")),
        _made("Memory", [_change(change, "more", "less") for change in _memory(comparison)], ("more", "less", "only in")),
        _made("Findings", list(_findings(comparison.findings)), ("new", "gone")),
        ComparisonTable("Logged", tuple((one.name, _level(one.a), _level(one.b), "") for one in comparison.logged)),
        ComparisonTable("Layers and parameters", tuple(_sites(comparison))),
        ComparisonTable("Given differently", _settings(comparison, of_environment=False)),
        ComparisonTable("Environment", _settings(comparison, of_environment=True)),
    ]
    return [table for table in found if table.rows]


def _settings(comparison: RunComparison, *, of_environment: bool) -> tuple[tuple[str, str, str, str], ...]:
    return tuple((one.name, one.a, one.b, "") for one in comparison.settings if (one.topic == "environment") == of_environment)


def _made(title: str, rows: list[tuple[str, str, str, str]], loud: tuple[str, ...]) -> ComparisonTable:
    return ComparisonTable(title, tuple(rows), frozenset(i for i, row in enumerate(rows) if any(word in row[3] for word in loud)))


def _runs(comparison: RunComparison) -> Iterator[tuple[str, str, str, str]]:
    a, b = comparison.a, comparison.b
    yield "run", a.run.name, b.run.name, ""
    yield "steps", f"{a.run.num_steps:,}", f"{b.run.num_steps:,}", ""
    yield "ended", ending(a), ending(b), ""
    yield "verdict", a.verdict, b.verdict, ""


def common(parting: Parting) -> str:
    """How much the two have in common: each observes the steps that its budget allows."""
    return f"{counted(parting.num_common, 'step')} that both have, {parting.num_both_observed:,} of them observed in both"


def _loss(one: LossComparison) -> ComparisonTable:
    rows = [
        ("at the end", _level(one.final_a), _level(one.final_b), ""),
        ("best", _level(one.best_a), _level(one.best_b), ""),
        (f"at step {one.equal_step_a.step:,}", *apart(one.equal_step_a.value, one.equal_step_b.value), _side(one)),
        (f"after {number(one.equal_time_s)} s", _level(one.equal_time_a), _level(one.equal_time_b), ""),
    ]
    if one.equal_step_a.step < 0:
        rows.pop(2)
    if max(one.first_bad_a, one.first_bad_b) >= 0:
        rows.append(("first not finite", _first(one.first_bad_a), _first(one.first_bad_b), ""))
    title = "Loss" if one.series == "loss" else f"Loss {one.series.partition(':')[2]}"
    return _made(title, rows, ("higher", "lower", "finite"))


def _side(one: LossComparison) -> str:
    told = SIDES[one.side]
    return f"{told} for good from step {one.left_step:,}" if one.left_step >= 0 else told


def _first(step: int) -> str:
    return f"at step {step:,}" if step >= 0 else "never"


def _level(level: Level) -> str:
    return f"{number(level.value)} at step {level.step:,}" if level.step >= 0 else NOTHING


def _times(comparison: RunComparison) -> Iterator[tuple[str, str, str, str]]:
    pace = comparison.pace
    if pace is None:
        return
    for change in pace.times:
        yield _change(change, "slower", "faster")
    for name, pair in (("steps/s", pace.steps_per_s), ("samples/s", pace.samples_per_s)):
        if any(rate == rate for rate in pair):
            yield name, _rate(pair[0]), _rate(pair[1]), ""


def _rate(rate: float) -> str:
    if rate != rate:
        return NOTHING
    return f"{rate:,.0f}" if rate >= 100 else number(rate)


def _memory(comparison: RunComparison) -> tuple[Change, ...]:
    return comparison.pace.memory if comparison.pace else ()


def _change(change: Change, more: str, less: str) -> tuple[str, str, str, str]:
    word = {"more": more, "less": less}.get(change.direction)
    told = f"{times(change.ratio)} {word}" if word else UNCHANGED.get(change.direction, change.direction)
    if change.a is None or change.b is None:
        told = f"not measured in {'A' if change.a is None else 'B'}"
    return change.name, _spread(change.a, change.unit), _spread(change.b, change.unit), told


def _spread(spread: Spread | None, unit: str) -> str:
    """`12.3 ms (11.9-12.8)`"""
    if spread is None:
        return NOTHING
    if unit == "ms":
        return f"{milliseconds(spread.median)} ms ({milliseconds(spread.low)}-{milliseconds(spread.high)})"
    return f"{large(spread.median, 'B')} ({large(spread.low, 'B')} - {large(spread.high, 'B')})"


def _findings(findings: FindingComparison) -> Iterator[tuple[str, str, str, str]]:
    for one in findings.new:
        other = "clear" if one.evaluated_in_other else "not evaluated"
        yield one.finding.rule, other, _finding(one.finding), "new" if one.evaluated_in_other else ""
    for one in findings.gone:
        other = "clear" if one.evaluated_in_other else "not evaluated"
        yield one.finding.rule, _finding(one.finding), other, "gone" if one.evaluated_in_other else ""
    for a, b in findings.same:
        yield a.rule, _finding(a), _finding(b), "in both"


def _finding(finding: Finding) -> str:
    place = f" in {finding.where}" if finding.where else ""
    return f"{finding.severity}{place} from step {finding.step:,}"


def _sites(comparison: RunComparison) -> Iterator[tuple[str, str, str, str]]:
    sites = comparison.sites
    if sites is None or not (sites.num_only_a or sites.num_only_b or sites.other_shapes):
        return
    only_a, only_b = (
        _listed(names, num) for names, num in ((sites.only_a, sites.num_only_a), (sites.only_b, sites.num_only_b))
    )
    yield "in one alone", only_a, only_b, f"{counted(sites.num_shared, 'place')} in both"
    for name, shape_a, shape_b in sites.other_shapes[:MAX_LISTED]:
        yield f"shape of {name}", str(shape_a), str(shape_b), ""


def _listed(names: tuple[str, ...], num: int) -> str:
    shown = listing(names[:MAX_LISTED], MAX_LISTED)
    return f"{shown} and {num - MAX_LISTED} more" if num > MAX_LISTED else shown or NOTHING
