"""Runs a script and profiles some of its training steps: the implementation of `sonde profile`."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from sonde.errors import SondeError
from sonde.profiler import ProfileReport
from sonde.profiler.profile_training_loop import StepWatcher, watch_steps
from sonde.script_runner import Script, ScriptResult, run_exit_functions, run_to_end


class ProfileFinished(SystemExit):
    """Ends a script whose profile is complete, as `sys.exit()` would: its `finally` blocks and atexit functions run."""


class ScriptProfile(NamedTuple):
    """The result of a script and its profile."""

    script: ScriptResult
    report: ProfileReport | None
    error: SondeError | None = None  # why there is no profile


def profile_script(
    target: str, args: Sequence[str], *, module: bool, num_steps: int, warmup: int,
    keep_going: Callable[[ProfileReport], None] | None = None,
) -> ScriptProfile:  # fmt: skip
    """Runs a file or a module until its profile is complete. With `keep_going`, the script runs to its end; `keep_going` is called with the
    profile as soon as it is complete."""
    title = target if module else Path(target).name
    watchers: list[StepWatcher] = []
    reports: list[ProfileReport] = []
    failures: list[Exception] = []

    def on_done() -> None:
        if keep_going is not None:
            try:
                reports.append(watchers[0].report(title))
                keep_going(reports[0])
            except Exception as error:  # a file that cannot be written must not end the training
                failures.append(error)
        elif threading.current_thread() is threading.main_thread():  # in another thread it would end that thread and the script would hang
            raise ProfileFinished(0)

    with Script(target, args, module=module) as running, watch_steps(num_steps=num_steps, warmup=warmup, on_done=on_done) as watcher:
        watchers.append(watcher)
        script = run_to_end(running)
        run_exit_functions()
    if failures:
        raise failures[0]
    try:
        return ScriptProfile(script, reports[0] if reports else watcher.report(title))
    except SondeError as error:
        return ScriptProfile(script, None, error)
