"""The verdict on a run in a small file of its directory, so that `sonde runs` can list many runs without judging them.

The file is a cache: it counts only while the logs have the same sizes and the same version of Sonde has the same rules. Its content is not
trusted. A file of that name that Sonde did not write is neither read nor replaced.
"""

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from sonde import __version__
from sonde.errors import SondeError
from sonde.formatting import number
from sonde.report.diagnose_run import diagnose
from sonde.report.report_types import Report, Verdict
from sonde.rules.registry import all_rules
from sonde.runlog.fatal_signal_file import FILE_PREFIX
from sonde.runlog.run_directory import log_sizes, read_json, replace_json, started_at
from sonde.runlog.run_reader import Run

VERDICT_FILE = "verdict.json"
MAX_BYTES = 1 << 20  # a longer file was not written by Sonde: that of 1000 ranks has 100 kB
MAX_TEXT, MAX_LOSS = 100_000, 20  # characters: names of layers may be long, numbers are not
TIME_LIMIT_S = 2.0  # for judging the runs of a list
JUDGED_BYTES_PER_S = 20e6  # of a log, on a slow machine: what is not expected to be judged in time is not begun


@dataclass(frozen=True, slots=True)
class CachedVerdict:
    """What `sonde runs` shows of a run."""

    verdict: Verdict
    num_steps: int
    ended: str  # as `RunFacts.ended`, or "killed by SIGILL (illegal instruction)"
    rule: str  # of the first finding; empty without findings
    where: str  # its place
    layer_type: str  # the class of the layer there
    last_loss: str  # empty: no loss was recorded


def summarize_report(report: Report) -> CachedVerdict:
    """The part of a report that is cached."""
    run, first = report.run, report.findings[0] if report.findings else None
    return CachedVerdict(
        verdict=report.verdict,
        num_steps=run.num_steps,
        ended=f"killed by {run.signal}" if run.signal else run.ended,
        rule=first.rule if first else "",
        where=first.where if first else "",
        layer_type=run.layer_types.get(first.where, "") if first else "",
        last_loss=number(run.loss[-1][1]) if run.loss else "",
    )


def write_verdict(run: Run, report: Report) -> None:
    """Cache the verdict on a run that has ended, where its directory can be written.

    A directory without run.json is dated by its modification time, which a new file would change, so it gets no cache.
    """
    if report.run.ended == "running" or not run.info or not run.path.is_dir():
        return
    target = run.path / VERDICT_FILE
    with contextlib.suppress(OSError, ValueError):  # no room, no permission, or a file of somebody else
        before = read_json(target, MAX_BYTES)
        if not before or "sonde" in before:
            replace_json(target, _key(run.path, run.log_sizes) | {"report": asdict(summarize_report(report))})


def read_verdict(path: Path) -> CachedVerdict | None:
    """The cached verdict; None if there is none, or none of this state of the logs by this version of Sonde."""
    try:
        content = read_json(path / VERDICT_FILE, MAX_BYTES)
        key = _key(path, log_sizes(path))
    except (OSError, ValueError):
        return None
    if any(content.get(name) != value for name, value in key.items()):
        return None
    return _parse(content.get("report"))


def _key(path: Path, sizes: dict[str, int]) -> dict[str, Any]:
    signals = {each.name: each.lstat().st_size for each in path.glob(f"{FILE_PREFIX}*")}
    return {"sonde": __version__, "logs": sizes | signals, "rules": sorted(rule.name for rule in all_rules())}


def _parse(report: Any) -> CachedVerdict | None:
    with contextlib.suppress(TypeError):  # not a mapping, a field too many or too few
        cached = CachedVerdict(**report)
        texts = (cached.ended, cached.rule, cached.where, cached.layer_type, cached.last_loss)
        is_valid = all(isinstance(text, str) and len(text) <= MAX_TEXT for text in texts)
        is_valid = is_valid and type(cached.num_steps) is int and 0 <= cached.num_steps < 1 << 63 and len(cached.last_loss) <= MAX_LOSS
        if is_valid and cached.verdict in get_args(Verdict):
            return cached
    return None


# ---- many runs


@dataclass(frozen=True, slots=True)
class ListedRun:
    """One row of `sonde runs`."""

    name: str
    started: float  # seconds since the epoch; 0 if unknown
    verdict: CachedVerdict | None = None  # None: not judged in time
    error: str = ""  # why the run cannot be read


def list_runs(paths: Iterable[Path], *, time_limit_s: float = TIME_LIMIT_S, clock: Callable[[], float] = time.monotonic) -> list[ListedRun]:
    """The runs with their verdicts. Those without a cached verdict are judged in this order, if the time that is left is enough."""
    deadline = clock() + time_limit_s
    return [_listed(path, lambda: deadline - clock()) for path in paths]


def _listed(path: Path, time_left_s: Callable[[], float]) -> ListedRun:
    started = started_at(path)
    if (cached := read_verdict(path)) is not None:
        return ListedRun(path.name, started, cached)
    if sum(log_sizes(path).values()) > time_left_s() * JUDGED_BYTES_PER_S:
        return ListedRun(path.name, started)
    try:
        run = Run(path)
        report = diagnose(run)
    except SondeError as error:
        return ListedRun(path.name, started, error=str(error))
    write_verdict(run, report)
    return ListedRun(path.name, started, summarize_report(report))
