"""Runs a script under a session with the same arguments, `__main__`, output and exit code as without Sonde."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from sonde.config import DebugConfig
from sonde.run_as_main import run_to_end, script_environment
from sonde.runlog.fatal_signal import fatal_signals_recorded
from sonde.session import DebugSession


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """Result of `run_script`: the run and how the script ended."""

    run: Path | None
    exit_code: int
    exception: BaseException | None = None
    lost: str = ""  # a sentence about records that could not be written, if the run does not mention them


def run_script(
    target: str, args: Sequence[str], *, module: bool, config: DebugConfig, to: str | None, name: str | None, strict: bool
) -> ScriptRun:
    """Run a file or a module to its end. Its errors are printed as Python prints them and determine the exit code."""
    session = DebugSession(config, to=to, name=name or _name(target, module), strict=strict)
    with script_environment(target, args, module=module):
        session.start(script=target)
        with fatal_signals_recorded(session.run) if session.run is not None else nullcontext():
            result = run_to_end(target, module=module)
    error = result.exception
    try:
        text = f"{type(error).__name__}: {error}"[:2000] if error is not None else ""
        session.record_exception(error)
        session.close(result.how, exit_code=result.exit_code, exception=text)
    except Exception:
        if strict:
            raise
    return ScriptRun(session.run, result.exit_code, error, session.describe_lost_records())


def _name(target: str, module: bool) -> str:
    return target.rpartition(".")[2] if module else Path(target).stem
