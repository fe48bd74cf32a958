"""compare(a, b) -> RunComparison: the differences of two runs in numbers, loss, speed, findings and settings, and a verdict."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sonde.comparison.comparison_verdict import Verdict, judge_comparison
from sonde.comparison.finding_changes import FindingChanges, find_finding_changes
from sonde.comparison.first_divergence import FirstDivergence, find_first_divergence
from sonde.comparison.loss_curves import LossComparison, compare_losses
from sonde.comparison.settings_differences import SettingDifference, SiteDifferences, compare_settings, compare_sites
from sonde.comparison.speed_and_memory import SpeedAndMemory, compare_speed_and_memory
from sonde.comparison.user_metrics import UserMetricComparison, compare_user_metrics
from sonde.formatting import strict
from sonde.report import Report, diagnose
from sonde.run_view import RunView, trained_view
from sonde.runlog.run_reader import Run

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Two runs side by side; `b` is described relative to `a`. The names of the fields are the keys of the JSON document."""

    a: Report
    b: Report
    verdict: Verdict  # identical | alike | different | unknown
    headline: str  # one sentence: the most important result
    details: tuple[str, ...]  # further sentences, the most important first
    notes: tuple[str, ...]  # what limits the comparison: ranks, attempts, different kernels
    parting: FirstDivergence | None  # None: one of them has no step, or they have none in common
    losses: tuple[LossComparison, ...]
    pace: SpeedAndMemory | None
    logged: tuple[UserMetricComparison, ...]
    findings: FindingChanges
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
            "pace": None if self.pace is None else _speed_and_memory(self.pace),
            "logged": [asdict(one) for one in self.logged],
            "findings": asdict(self.findings),
            "sites": None if self.sites is None else asdict(self.sites),
            "settings": [asdict(one) for one in self.settings],
        }
        plain: dict[str, Any] = strict(document)
        return plain


def comparison_json(comparison: RunComparison) -> str:
    return json.dumps(comparison.to_dict(), indent=1, allow_nan=False) + "\n"


def compare(a: Run | Path | str, b: Run | Path | str) -> RunComparison:
    """Compare two runs: runs, or paths of run directories or `.sonde` files."""
    first, second = (one if isinstance(one, Run) else Run(one) for one in (a, b))
    reports = diagnose(first), diagnose(second)
    rank = next((rank for rank in first.ranks if rank in second.ranks), 0)
    one, other = trained_view(first, rank), trained_view(second, rank)
    notes = _notes((first, second), rank)
    findings = find_finding_changes(*reports)
    if one is None or other is None:
        settings = compare_settings((first, second), (one or _newest(first, rank), other or _newest(second, rank)))
        verdict, headline, details = judge_comparison(reports, None, (), None, findings, settings)
        return RunComparison(*reports, verdict, headline, details, notes, None, (), None, (), findings, None, settings)
    has_same_kernel = len({view.process.manifest.get("native_kernel") for view in (one, other)}) == 1
    if not has_same_kernel:
        notes += ("one run was measured by the native kernel, the other by torch operations: differences in last digits are ignored",)
    divergence = find_first_divergence(one, other, exact=has_same_kernel)
    losses = tuple(compare_losses(one, other))
    speed_and_memory = compare_speed_and_memory(one, other)
    settings = compare_settings((first, second), (one, other))
    verdict, headline, details = judge_comparison(reports, divergence, losses, speed_and_memory, findings, settings)
    return RunComparison(
        *reports, verdict, headline, details, notes, divergence, losses, speed_and_memory, compare_user_metrics(one, other), findings,
        compare_sites(one, other), settings,
    )  # fmt: skip


def _newest(run: Run, rank: int) -> RunView | None:
    """The newest attempt of a rank, also one without a complete step."""
    return next((RunView(process) for process in reversed(run.processes) if process.rank == rank), None)


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


def _speed_and_memory(compared: SpeedAndMemory) -> dict[str, Any]:
    changes = {name: [asdict(change) | {"ratio": change.ratio} for change in getattr(compared, name)] for name in ("times", "memory")}
    return asdict(compared) | changes
