"""compare(a, b) -> RunComparison: two runs side by side, and what of their differences is worth telling.

A `RunComparison` is a value. Views draw it and compute nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sonde.comparison.curves import LossComparison, compare_losses
from sonde.comparison.findings import FindingComparison, compare_findings
from sonde.comparison.logged import LoggedComparison, compare_logged
from sonde.comparison.pace import Pace, compare_pace
from sonde.comparison.parting import Parting, find_parting
from sonde.comparison.settings import SettingDifference, SiteDifferences, compare_settings, compare_sites
from sonde.comparison.verdict import Verdict, verdict_on
from sonde.formatting import strict
from sonde.report import Report, diagnose
from sonde.run_view import RunView, trained_view
from sonde.runlog.reader import Run

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Two runs side by side. `a` is the one that the other is measured by."""

    a: Report
    b: Report
    verdict: Verdict  # identical | alike | different | unknown
    headline: str  # one sentence: what a person wants to know first
    details: tuple[str, ...]  # further sentences, the most important first
    notes: tuple[str, ...]  # what limits the comparison: ranks, attempts, code that measured
    parting: Parting | None  # None: one of them has no step, or they have none in common
    losses: tuple[LossComparison, ...]
    pace: Pace | None
    logged: tuple[LoggedComparison, ...]
    findings: FindingComparison
    sites: SiteDifferences | None
    settings: tuple[SettingDifference, ...]

    @property
    def exit_code(self) -> int:
        return 1 if self.verdict == "different" else 0

    def summary(self) -> str:
        """A few lines of plain text."""
        return "\n".join([f"{self.verdict}: {self.headline}", *self.details])

    def to_dict(self) -> dict[str, Any]:
        """Everything, in the types of strict JSON; what is not finite is the string "NaN", "Infinity" or "-Infinity"."""
        document = {
            "schema": SCHEMA,
            "a": _subject(self.a),
            "b": _subject(self.b),
            "verdict": self.verdict,
            "headline": self.headline,
            "details": self.details,
            "notes": self.notes,
            "parting": None if self.parting is None else asdict(self.parting),
            "losses": [asdict(one) for one in self.losses],
            "pace": None if self.pace is None else _pace(self.pace),
            "logged": [asdict(one) for one in self.logged],
            "findings": asdict(self.findings),
            "sites": None if self.sites is None else asdict(self.sites),
            "settings": [asdict(one) for one in self.settings],
        }
        plain: dict[str, Any] = strict(document)
        return plain


def compare(a: Run | Path | str, b: Run | Path | str) -> RunComparison:
    """What two runs have in common and what they have not. """
    runs = tuple(one if isinstance(one, Run) else Run(one) for one in (a, b))
    first, second = runs
    reports = diagnose(first), diagnose(second)
    rank = _rank(first, second)
    one, other = trained_view(first, rank), trained_view(second, rank)
    notes = _notes((first, second), rank)
    findings = compare_findings(*reports)
    if one is None or other is None:
        settings = compare_settings((first, second), (one or _newest(first, rank), other or _newest(second, rank)))
        verdict, headline, details = verdict_on(reports, None, (), None, findings, settings)
        return RunComparison(*reports, verdict, headline, details, notes, None, (), None, (), findings, None, settings)
    same_code = _kernel(one) == _kernel(other)
    parting = find_parting(one, other, exact=same_code)
    losses = tuple(compare_losses(one, other))
    pace = compare_pace(one, other)
    settings = compare_settings((first, second), (one, other))
    verdict, headline, details = verdict_on(reports, parting, losses, pace, findings, settings)
    if not same_code:
        notes += ("one run was measured by the native kernel, the other by torch operations: differences in last digits are not told",)
    return RunComparison(
        *reports, verdict, headline, details, notes, parting, losses, pace, compare_logged(one, other), findings, compare_sites(one, other),
        settings,
    )  # fmt: skip


def _newest(run: Run, rank: int) -> RunView | None:
    """The newest attempt of a rank, be it without a complete step."""
    return next((RunView(process) for process in reversed(run.processes) if process.rank == rank), None)


def _rank(a: Run, b: Run) -> int:
    """The lowest that both have: each process trains by itself, and two of them can be compared."""
    shared = [rank for rank in a.ranks if rank in b.ranks]
    return shared[0] if shared else 0


def _kernel(view: RunView) -> object:
    return view.process.manifest.get("native_kernel")


def _notes(runs: tuple[Run, Run], rank: int) -> tuple[str, ...]:
    notes = []
    for name, run in zip("AB", runs):
        if len(run.ranks) > 1:
            notes.append(f"{name} has {len(run.ranks)} ranks; rank {rank} is compared, the findings are those of all")
        attempts = {process.attempt for process in run.processes if process.rank == rank}
        if len(attempts) > 1:
            notes.append(f"{name} was started {len(attempts)} times; its newest attempt that trained is compared")
        if run.damage:
            notes.append(f"parts of {name} could not be read, and are not compared")
        if run.gaps:
            notes.append(f"{name} could not write {sum(gap.num_dropped for gap in run.gaps)} records, which are not compared")
    if runs[0].path.resolve() == runs[1].path.resolve():
        notes.append("A and B are the same run")
    return tuple(notes)


def _subject(report: Report) -> dict[str, Any]:
    run = report.run
    return {
        "run": run.name,
        "path": str(run.path),
        "steps": run.num_steps,
        "last_step": run.last_step,
        "ended": run.ended,
        "exception": run.exception,
        "ranks": run.num_ranks,
        "num_observed": report.overhead.num_observed,
        "verdict": report.verdict,
        "why_unknown": report.why_unknown,
    }


def _pace(pace: Pace) -> Mapping[str, Any]:
    document = asdict(pace)
    for name in ("times", "memory"):
        for row, change in zip(document[name], getattr(pace, name)):
            row["ratio"] = change.ratio
    return document
