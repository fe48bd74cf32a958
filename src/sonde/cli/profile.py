"""`sonde profile`: times the layers of a training script."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from sonde.cli._script_argument import check_script, script_command
from sonde.cli._terminal import open_terminal
from sonde.errors import OutputExistsError, SondeError
from sonde.formatting import printable

if TYPE_CHECKING:
    from sonde.profiler import ProfileComparison, ProfileReport


@script_command
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, metavar="N", help="Steps to time.")
@click.option("--warmup", type=click.IntRange(min=0), default=3, show_default=True, metavar="N", help="Steps before the first timed step.")
@click.option("--keep-going", is_flag=True, help="Continue the training after the profile.")
@click.option(
    "-o", "--output", "outputs", type=click.Path(path_type=Path), multiple=True,
    help="A file: .html (flame graph), .json (profile), .json.gz or .trace.json (trace for Perfetto). May be repeated.",
)  # fmt: skip
@click.option("--against", type=click.Path(path_type=Path), metavar="OLD.json", help="Compare with a saved profile.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document to stdout, and the output of the script to stderr.")
@click.option("--force", is_flag=True, help="Replace files that exist.")
def profile(
    module: bool,
    steps: int,
    warmup: int,
    keep_going: bool,
    outputs: tuple[Path, ...],
    against: Path | None,
    as_json: bool,
    force: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Time the layers of a training script, forward and backward.

    The script needs no change. After the warm-up, timed and untimed steps alternate; then the script ends as by sys.exit(), unless
    --keep-going is given. The profile is printed to stderr.

    \b
    Example:  sonde profile train.py --lr 0.1
              sonde profile -o profile.html -o trace.json.gz train.py
              sonde profile -o before.json train.py
              sonde profile --against before.json train.py

    Exit code: that of the script if it fails; 1 if --against finds the step slower; 2 if nothing could be profiled.
    """
    check_script("profile", script, module=module)
    from sonde.profiler import load

    for output in outputs:
        _check_output(output, force)
    before = load(against) if against is not None else None
    from sonde.profiler.profile_script import profile_script

    shown: list[ProfileReport] = []
    compared: list[ProfileComparison] = []

    def show(report: ProfileReport) -> None:
        shown.append(report)
        if os.environ.get("RANK", "0") == "0":  # only the first of the processes that torchrun starts prints
            compared.extend([report.compare(before)] if before is not None else [])
            comparison = compared[0] if compared else None
            # Printed first, and every file is tried: one that cannot be written must not lose the rest.
            _print(report, comparison, stdout)
            errors = [str(error) for output in outputs if (error := _save(report, output, force, comparison))]
            if errors:
                raise SondeError("\n".join(errors))

    stdout = _stdout_for_json() if as_json else None
    meanwhile = show if keep_going else None
    profiled = profile_script(script, args, module=module, num_steps=steps, warmup=warmup, keep_going=meanwhile)
    if profiled.report is None:
        _report_failure(profiled.error, script, profiled.script.exit_code)
    elif not shown:
        show(profiled.report)
    slower = bool(compared) and compared[0].step.verdict == "slower"
    raise SystemExit(profiled.script.exit_code or (1 if slower else 0))


def _save(report: ProfileReport, output: Path, force: bool, comparison: ProfileComparison | None) -> SondeError | None:
    """Write one file; returns the error if that fails."""
    from sonde.profiler import save

    try:
        save(report, output, replace=force, comparison=comparison)
    except SondeError as error:
        return error
    click.echo(printable(output), err=True)
    return None


def _print(report: ProfileReport, comparison: ProfileComparison | None, stdout: TextIO | None) -> None:
    if stdout is not None:
        document = report.to_dict() | {"spans": []}  # for a trace: -o trace.json.gz
        text = json.dumps(document | ({"comparison": comparison.to_dict()} if comparison else {}), indent=1, allow_nan=False)
        with stdout:
            stdout.write(text + "\n")
        return
    from sonde.render.terminal.profile_terminal import TerminalProfile, TerminalProfileComparison

    terminal = open_terminal(stderr=True, is_wide=True)
    terminal.print(TerminalProfile(report))
    if comparison is not None:
        terminal.print()
        terminal.print(TerminalProfileComparison(comparison))


def _check_output(output: Path, force: bool) -> None:
    """Before the script runs, so that nobody waits for a profile that cannot be written."""
    from sonde.profiler.profile_report import check_suffix

    check_suffix(output)
    if output.exists() and not force:
        raise OutputExistsError(output)
    if not output.parent.is_dir():
        raise SondeError(f"{output} cannot be written: there is no directory {output.parent}.")


def _report_failure(why: SondeError | None, script: str, exit_code: int) -> None:
    if not exit_code:
        raise SondeError(f"{script} gave no profile: {why}")
    # The script has printed its own error.
    click.echo(f"sonde: {printable(script)} ended with exit code {exit_code} before it could be profiled.", err=True)


def _stdout_for_json() -> TextIO:
    """The stdout of Sonde. The script, and the processes that it starts, print to stderr from now on."""
    sys.stdout.flush()
    ours = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return ours
