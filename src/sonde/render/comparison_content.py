"""What every rendering of a comparison shows: tables of text on two runs, side by side, and notes."""

from collections.abc import Iterator
from typing import NamedTuple

from sonde.comparison.compare import RunComparison
from sonde.comparison.comparison_verdict import distinct_numbers, times_larger
from sonde.comparison.finding_changes import ChangedFinding
from sonde.comparison.loss_curves import Level, LossComparison
from sonde.comparison.speed_and_memory import Change, Spread
from sonde.events import Finding
from sonde.formatting import DASH, counted, listing, milliseconds, number, rate, si_number
from sonde.render.report_content import ending, in_place
from sonde.report import Report
from sonde.report.report_types import verdict_words

ComparisonRow = tuple[str, str, str, str]
TOO_FEW = "too few steps to compare"
SIDES = {
    "higher": "B is higher", "lower": "B is lower", "same": "within A's band", "not finite": "B is not finite",
    "finite": "A is not finite", "unknown": TOO_FEW,
}  # fmt: skip
UNCHANGED = {"same": "unchanged", "slight": "too little to matter", "unclear": "within the spread", "unknown": TOO_FEW}
MAX_LISTED = 6  # layers that only one run has: more are counted


class ComparisonTable(NamedTuple):
    """Rows of four texts: the quantity, its value in A and in B, and the difference in words."""

    title: str
    rows: tuple[ComparisonRow, ...]
    notable: frozenset[int] = frozenset()  # indices of the rows that differ


def comparison_tables(comparison: RunComparison) -> list[ComparisonTable]:
    """All tables that have rows."""
    memory = [_change(change, "more", "less") for change in comparison.pace.memory] if comparison.pace else []
    a, b, settings = comparison.a, comparison.b, comparison.settings
    runs = (
        ("run", a.run.name, b.run.name, ""), ("steps", f"{a.run.num_steps:,}", f"{b.run.num_steps:,}", ""),
        ("ended", ending(a), ending(b), ""), ("verdict", verdict_words(a.verdict), verdict_words(b.verdict), ""),
    )  # fmt: skip
    found = [
        ComparisonTable("Runs", runs),
        *(_loss(one) for one in comparison.losses),
        _with_notable("Time", list(_times(comparison)), ("slower", "faster", "only in")),
        _with_notable("Memory", memory, ("more", "less", "only in")),
        _with_notable("Findings", list(_findings(comparison)), ("new", "gone")),
        ComparisonTable("Logged metrics", tuple((one.name, _level(one.a), _level(one.b), "") for one in comparison.logged)),
        ComparisonTable("Layers and parameters", tuple(_sites(comparison))),
        ComparisonTable("Settings that differ", tuple((one.name, one.a, one.b, "") for one in settings if one.topic != "environment")),
        ComparisonTable("Environment", tuple((one.name, one.a, one.b, "") for one in settings if one.topic == "environment")),
    ]
    return [table for table in found if table.rows]


def _with_notable(title: str, rows: list[ComparisonRow], words: tuple[str, ...]) -> ComparisonTable:
    return ComparisonTable(title, tuple(rows), frozenset(i for i, row in enumerate(rows) if any(word in row[3] for word in words)))


def common_steps(comparison: RunComparison) -> str:
    """How many steps are in both runs; empty where the steps were not compared."""
    if comparison.parting is None:
        return ""
    num, num_observed = comparison.parting.num_common, comparison.parting.num_both_observed
    return f"{counted(num, 'step')} that both have, {num_observed:,} of them observed in both"


def comparison_notes(comparison: RunComparison) -> list[str]:
    """The number of common steps, and the notes of the comparison."""
    return [note for note in (common_steps(comparison), *comparison.notes) if note]


def _loss(one: LossComparison) -> ComparisonTable:
    # A window of losses begins at `left_step`; of losses that are not finite, the last row has the very step.
    has_step = one.left_step >= 0 and one.side not in ("not finite", "finite")
    side = SIDES[one.side] + (f" for good from step {one.left_step:,}" if has_step else "")
    rows = [
        ("at the end", _level(one.final_a), _level(one.final_b), ""),
        ("best", _level(one.best_a), _level(one.best_b), ""),
        (f"at step {one.equal_step_a.step:,}", *distinct_numbers(one.equal_step_a.value, one.equal_step_b.value), side),
        (f"after {number(one.equal_time_s)} s", _level(one.equal_time_a), _level(one.equal_time_b), ""),
    ]
    if one.equal_step_a.step < 0:
        rows.pop(2)
    if max(one.first_bad_a, one.first_bad_b) >= 0:
        first_a, first_b = (f"at step {step:,}" if step >= 0 else "never" for step in (one.first_bad_a, one.first_bad_b))
        rows.append(("first not finite", first_a, first_b, ""))
    title = "Loss" if one.series == "loss" else f"Loss {one.series.partition(':')[2]}"
    return _with_notable(title, rows, ("higher", "lower", "finite"))


def _level(level: Level) -> str:
    return f"{number(level.value)} at step {level.step:,}" if level.step >= 0 else DASH


def _times(comparison: RunComparison) -> Iterator[ComparisonRow]:
    pace = comparison.pace
    if pace is None:
        return
    for change in pace.times:
        yield _change(change, "slower", "faster")
    for name, pair in (("steps/s", pace.steps_per_s), ("samples/s", pace.samples_per_s)):
        if any(per_s == per_s for per_s in pair):
            yield name, rate(pair[0]), rate(pair[1]), ""


def _change(change: Change, more: str, less: str) -> ComparisonRow:
    word = {"more": more, "less": less}.get(change.direction)
    difference = f"{times_larger(change.ratio)} {word}" if word else UNCHANGED.get(change.direction, change.direction)
    if change.a is None or change.b is None:
        difference = f"not measured in {'A' if change.a is None else 'B'}"
    return change.name, _spread(change.a, change.unit), _spread(change.b, change.unit), difference


def _spread(spread: Spread | None, unit: str) -> str:
    """`12.3 ms (11.9-12.8)`"""
    if spread is None:
        return DASH
    if unit == "ms":
        return f"{milliseconds(spread.median)} ms ({milliseconds(spread.low)}-{milliseconds(spread.high)})"
    return f"{si_number(spread.median, 'B')} ({si_number(spread.low, 'B')} - {si_number(spread.high, 'B')})"


def _findings(comparison: RunComparison) -> Iterator[ComparisonRow]:
    changes, a, b = comparison.findings, comparison.a, comparison.b
    for one in changes.new:
        yield one.finding.rule, _absent(one), _finding(one.finding, b), "new" if one.evaluated_in_other else ""
    for one in changes.gone:
        yield one.finding.rule, _finding(one.finding, a), _absent(one), "gone" if one.evaluated_in_other else ""
    for in_a, in_b in changes.same:
        yield in_a.rule, _finding(in_a, a), _finding(in_b, b), "in both"


def _absent(changed: ChangedFinding) -> str:
    return "clear" if changed.evaluated_in_other else "not evaluated"


def _finding(finding: Finding, report: Report) -> str:
    return f"{finding.severity}{in_place(finding, report)} from step {finding.step:,}"


def _sites(comparison: RunComparison) -> Iterator[ComparisonRow]:
    sites = comparison.sites
    if sites is None or not (sites.num_only_a or sites.num_only_b or sites.other_shapes):
        return
    only_a, only_b = _listed(sites.only_a, sites.num_only_a), _listed(sites.only_b, sites.num_only_b)
    yield "in one alone", only_a, only_b, f"{counted(sites.num_shared, 'place')} in both"
    for name, shape_a, shape_b in sites.other_shapes[:MAX_LISTED]:
        yield f"shape of {name}", str(shape_a), str(shape_b), ""


def _listed(names: tuple[str, ...], num: int) -> str:
    shown = listing(names[:MAX_LISTED], MAX_LISTED)
    return f"{shown} and {num - MAX_LISTED} more" if num > MAX_LISTED else shown or DASH
