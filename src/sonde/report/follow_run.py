"""Follows a run that grows: diagnoses it again from time to time, at a bounded cost."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sonde.events import Finding
from sonde.report.diagnose_run import diagnose
from sonde.report.report_types import Report
from sonde.runlog.run_directory import log_sizes
from sonde.runlog.run_reader import Run

GROWTH = 0.1  # of the log, before it is diagnosed again
INTERVAL_S = 10.0  # at least, between two diagnoses
MAX_CPU_SHARE = 0.05  # of one core, on average over diagnoses and polls
POLL_S = 0.5  # between two checks of the size of the log …
MAX_POLL_SHARE = 0.01  # … or longer, if one check of many files takes more than this share of the time


def follow(
    path: Path,
    *,
    clock: Callable[[], float] = time.monotonic,
    cpu: Callable[[], float] = time.process_time,
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[Report]:
    """A report now, and another whenever the run has grown by a tenth, but not before 10 s have passed. The last one is of the ended run.

    The arguments after the path are the clocks and the pause of the loop.
    """
    started, cpu_before = clock(), cpu()
    run = Run(path)
    while True:
        judged_at, judged_size = clock(), _total(path)
        is_running = run.ended.how == "running"
        yield diagnose(run)
        if not is_running:
            return
        size, pause = judged_size, POLL_S
        while run.ended.how == "running":
            wait(pause)
            poll_cpu, size_before, size = cpu(), size, _total(path)
            not_before = max(judged_at + INTERVAL_S, started + (poll_cpu - cpu_before) / MAX_CPU_SHARE)
            if clock() >= not_before and size >= judged_size * (1 + GROWTH):
                break
            pause = max(POLL_S, (cpu() - poll_cpu) / MAX_POLL_SHARE)
            if size == size_before:  # the training pauses or has ended; while it writes, nothing is read before it is due
                run.refresh()
        run.refresh()


def _total(path: Path) -> int:
    return sum(log_sizes(path).values())


def new_and_gone(before: Sequence[Finding], now: Sequence[Finding]) -> tuple[list[Finding], list[Finding]]:
    """The findings that appeared and those that disappeared between two diagnoses, by rule and place; each once."""
    old, new = ({(each.rule, each.where): each for each in reversed(findings)} for findings in (before, now))
    appeared = [each for each in now if (each.rule, each.where) not in old and new[each.rule, each.where] is each]
    return appeared, [each for key, each in old.items() if key not in new]
