"""A script run as it is, some of its steps profiled: what `sonde profile` does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sonde.errors import SondeError
from sonde.launcher import ScriptResult, run_to_end, script_environment
from sonde.profiler import ProfileReport
from sonde.profiler.script_step_watcher import StepWatcher, watch_steps


class Enough(SystemExit):
    """Ends a script when its profile is there, as `sys.exit()` would: what the script does on leaving is done."""


@dataclass(frozen=True, slots=True)
class Profiled:
    """What became of the script, and of the profile."""

    played: ScriptResult
    report: ProfileReport | None
    why_not: SondeError | None = None  # where there is no profile: a letter that says why


def profile_script(
    target: str,
    args: Sequence[str],
    *,
    module: bool,
    num_steps: int,
    warmup: int,
    keep_going: Callable[[ProfileReport], None] | None = None,
) -> Profiled:
    """Runs a file or a module until its profile is there; with `keep_going`, which is given the profile meanwhile, to its end."""
    title = target if module else Path(target).name
    watchers: list[StepWatcher] = []
    reports: list[ProfileReport] = []
    failures: list[Exception] = []

    def done() -> None:
        if keep_going is not None:
            try:
                reports.append(watchers[0].report(title))
                keep_going(reports[0])
            except Exception as error:  # a file that cannot be written is no reason to end a training
                failures.append(error)
        elif threading.current_thread() is threading.main_thread():  # in another, it would end the thread and leave the script waiting
            raise Enough(0)

    with script_environment(target, args, module=module), watch_steps(num_steps=num_steps, warmup=warmup, on_done=done) as watcher:
        watchers.append(watcher)
        played = run_to_end(target, module=module)
    if failures:
        raise failures[0]
    try:
        return Profiled(played, reports[0] if reports else watcher.report(title))
    except SondeError as nothing:
        return Profiled(played, None, nothing)
