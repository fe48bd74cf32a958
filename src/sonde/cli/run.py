"""`sonde run`: watch a training script."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING

import click

from sonde.cli._script_argument import check_script, script_command
from sonde.cli._terminal import StartupStderr
from sonde.errors import RunNotWritable
from sonde.formatting import printable
from sonde.script_runner import existing_directory, run_exit_functions

if TYPE_CHECKING:
    from sonde.config import DebugConfig
    from sonde.report import Report


@script_command
@click.option("--every", type=int, metavar="N", help="Observe every N-th step, at any cost.")
@click.option("--budget", type=float, metavar="SHARE", help="Share of the training time that Sonde may take.  [default: 0.02]")
@click.option("--mode", metavar="MODE", help="What is measured.  [default: full_debug]")
@click.option("--level", metavar="LEVEL", help="Depth: basic, intermediate, advanced or expert.  [default: intermediate]")
@click.option("--preset", metavar="NAME", help="Settings by name: basic, advanced or production.")
@click.option("--layer", "layers", metavar="PATTERN", multiple=True, help="Measure these layers only; may be repeated.")
@click.option("--switch", "switches", metavar="SWITCH", multiple=True, help="Turn a switch on, or all; may be repeated.")
@click.option("--set", "settings", metavar="NAME=VALUE", multiple=True, help="Another setting; may be repeated.")
@click.option("--to", metavar="DIR", help="Directory of the run.  [default: a new one in runs/]")
@click.option("--name", metavar="NAME", help="Part of the name of the directory.  [default: the name of the script]")
@click.option("--strict", is_flag=True, help="Stop at an internal error of Sonde instead of training on.")
@click.option("--check", is_flag=True, help="Exit with 1 for problems and 3 for an unknown verdict, for CI.")
@click.option("--quiet", is_flag=True, help="Print no verdict.")
def run(
    module: bool,
    every: int | None,
    budget: float | None,
    mode: str | None,
    level: str | None,
    preset: str | None,
    layers: tuple[str, ...],
    switches: tuple[str, ...],
    settings: tuple[str, ...],
    to: str | None,
    name: str | None,
    strict: bool,
    check: bool,
    quiet: bool,
    script: str,
    args: tuple[str, ...],
) -> Callable[[], int]:
    """Run a training script and show what is wrong with it.

    The script needs no change. Its output, results and exit code stay the same; the verdict is printed to stderr. SCRIPT may also be a
    directory or a zip archive with a __main__.py.

    \b
    Example:  sonde run train.py --lr 0.1
              sonde run -m pkg.train --epochs 3
              sonde run --every 1 --to runs/base train.py
              sonde run --preset production --switch memory_usage train.py

    Exit code: that of the script. With --check, if the script succeeds: 0 healthy or nothing found, 1 problems, 3 unknown.
    """
    from sonde.config import SWITCH_SETTINGS, load_config, setting_from_text
    from sonde.runlog.switch_file import parse_switch_words

    asked = parse_switch_words(f"+{each}" for each in switches)
    flags: dict[str, object] = {name: True for name, switch in SWITCH_SETTINGS.items() if switch in asked}
    flags |= {"preset": preset, "every": every, "overhead_budget": budget, "mode": mode, "level": level, "layers": layers or None}
    config = load_config(**dict(setting_from_text(each) for each in settings) | {k: v for k, v in flags.items() if v is not None})
    check_script("run", script, module=module)
    return partial(_watch, script, args, module=module, config=config, to=to, name=name, strict=strict, check=check, quiet=quiet)


def _watch(
    script: str, args: tuple[str, ...], *, module: bool, config: DebugConfig, to: str | None, name: str | None, strict: bool, check: bool,
    quiet: bool,
) -> int:  # fmt: skip
    """Run the script to its end, threads and functions of atexit included, and print the verdict. Returns the exit code."""
    began_ns = perf_counter_ns()
    with existing_directory():  # importing torch ends the process where the working directory was deleted
        from sonde.session import TORCH_IMPORT_NS, run_script

    import_ns = perf_counter_ns() - began_ns - TORCH_IMPORT_NS  # the script imports torch as well
    stderr, process, directory = StartupStderr(), os.getpid(), _working_directory()
    launched = run_script(
        script, args, module=module, config=config, to=to, name=name, strict=strict, on_end=run_exit_functions,
        on_not_writable=None if check else _say_not_watched, import_ns=import_ns,
    )  # fmt: skip
    with suppress(Exception):  # what the script printed comes before the verdict; Python reports at its end what is wrong with the stream
        sys.stdout.flush()
    report = None
    # Only the first of the processes that torchrun starts prints a verdict, and no child that the script has forked.
    is_first = os.environ.get("RANK", "0") == "0" and os.getpid() == process
    if launched.run is not None and is_first and (check or not quiet):
        with stderr.in_place():
            report = _judged(_short_path(launched.run, directory), launched.lost, quiet=quiet, strict=strict)
    launched.script.enter()  # what is left of it (daemon threads, destructors) finds its own modules until Python ends
    if type(launched.exception) is KeyboardInterrupt:
        raise KeyboardInterrupt
    return launched.exit_code or (report.exit_code if check and report is not None else 0)


def _say_not_watched(error: RunNotWritable) -> None:
    with suppress(Exception):
        click.echo(f"sonde: {printable(str(error))}\n       The script runs without Sonde.", err=True)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return ""


def _short_path(path: Path, directory: str) -> Path:
    """The path from the directory of the user's shell, unless it is elsewhere or the script has left that directory."""
    return path.relative_to(directory) if directory == _working_directory() and path.is_relative_to(directory or os.devnull) else path


def _judged(path: Path, lost: str, *, quiet: bool, strict: bool) -> Report | None:
    """Print the verdict to stderr. The training is over: no error here may change how it ended."""
    if not path.is_dir():
        click.echo(f"sonde: the run in {printable(path)} was removed while the script ran: nothing is left to judge.", err=True)
        return None
    try:
        from rich.text import Text

        from sonde.cli._terminal import diagnose_with_progress, open_terminal
        from sonde.render.terminal.report_terminal import TerminalReport

        report = diagnose_with_progress(path, lost=lost)
        if not quiet and (report.run.num_steps or report.findings):
            open_terminal(stderr=True).print(TerminalReport(report))
        elif not quiet:  # not a training, or nothing of it is in the run: one line is enough
            open_terminal(stderr=True).print(Text(printable(report.why_unknown)))
        if lost and report.run.num_steps:
            click.echo(f"sonde: {printable(lost)}: the verdict is about the rest.", err=True)
    except Exception as error:
        if strict:
            raise

        reason = printable(f"{type(error).__name__}: {error}")
        click.echo(f"sonde: the run was recorded, but judging it failed: {reason}", err=True)
        click.echo(f"       Try again: sonde diagnose {printable(path)}", err=True)
        return None
    return report
