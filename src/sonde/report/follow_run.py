"""Follows a run that grows: diagnoses it again from time to time, at a bounded cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sonde.events import Finding
from sonde.report.diagnose_run import diagnose
from sonde.report.report_types import Report
from sonde.runlog.directory import LOG_SUFFIX
from sonde.runlog.reader import Run

GROWTH = 0.1  # of the log, before it is diagnosed again
INTERVAL_S = 10.0  # at least, between two diagnoses
MAX_CPU_SHARE = 0.05  # of one core, on average
POLL_S = 0.5  # between two looks at the size of the log


def follow(
    path: Path,
    *,
    clock: Callable[[], float] = time.monotonic,
    cpu: Callable[[], float] = time.process_time,
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[Report]:
    """A report now, and another whenever the run has grown by a tenth, but not before 10 s have passed. Ends with the run.

    The arguments after the path are the clocks and the pause of the loop.
    """
    run = Run(path)
    while True:
        started, cpu_before = clock(), cpu()
        size = log_size(path)
        is_running = run.ended.how == "running"
        yield diagnose(run)
        if not is_running:
            return
        not_before = started + max(INTERVAL_S, (cpu() - cpu_before) / MAX_CPU_SHARE)
        while run.ended.how == "running" and (clock() < not_before or log_size(path) < size * (1 + GROWTH)):
            wait(POLL_S)
            run.refresh()


def log_size(path: Path) -> int:
    """The bytes of all logs of a run."""
    files = [path] if path.is_file() else path.glob(f"*{LOG_SUFFIX}")
    return sum(file.lstat().st_size for file in files)


def new_findings(findings: Sequence[Finding], printed: set[tuple[str, str]]) -> list[Finding]:
    """The findings whose rule and place were not there before; `printed` is updated."""
    fresh = [each for each in findings if (each.rule, each.where) not in printed]
    printed |= {(each.rule, each.where) for each in fresh}
    return fresh
