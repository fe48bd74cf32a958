"""`sonde run`: watch a script that knows nothing of Sonde."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sonde.cli._script_argument import check_script
from sonde.formatting import printable

if TYPE_CHECKING:
    from sonde.report import Report


# Whatever follows the script belongs to the script, options too.
@click.command(context_settings={"allow_interspersed_args": False}, options_metavar="[OPTIONS]")
@click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module, as in python -m.")
@click.option("--every", type=int, metavar="N", help="Observe every N-th step, whatever it costs.")
@click.option("--budget", type=float, metavar="SHARE", help="Share of the time that Sonde may take.  [default: 0.02]")
@click.option("--mode", metavar="MODE", help="Which aspects are measured.  [default: full_debug]")
@click.option("--level", metavar="LEVEL", help="How deep: basic, intermediate, advanced, expert.  [default: intermediate]")
@click.option("--set", "settings", metavar="NAME=VALUE", multiple=True, help="Any other setting; may be given several times.")
@click.option("--to", metavar="DIR", help="The directory of this run.  [default: a new one in runs/]")
@click.option("--name", metavar="NAME", help="A name for the run's directory.  [default: the script's]")
@click.option("--strict", is_flag=True, help="Stop at an error of Sonde's own instead of training on.")
@click.option("--check", is_flag=True, help="Exit with 1 if problems were found, with 3 if the verdict is unknown: for use in CI.")
@click.option("--quiet", is_flag=True, help="Print no verdict.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    module: bool,
    every: int | None,
    budget: float | None,
    mode: str | None,
    level: str | None,
    settings: tuple[str, ...],
    to: str | None,
    name: str | None,
    strict: bool,
    check: bool,
    quiet: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run a training script under watch and say what is wrong with it.

    The script needs no change: models, optimizers and loops are found by themselves. Its output, its results and its
    exit code stay what they are; the verdict goes to stderr.

    \b
    Example:  sonde run train.py --lr 0.1
              sonde run -m pkg.train --epochs 3
              sonde run --every 1 --to runs/base train.py
    """
    from sonde.config import load_config, setting_from_text

    flags = {"every": every, "overhead_budget": budget, "mode": mode, "level": level}
    config = load_config(**dict(setting_from_text(each) for each in settings) | {k: v for k, v in flags.items() if v is not None})
    check_script("run", script, module=module)
    from sonde.session import run_script

    launched = run_script(script, args, module=module, config=config, to=to, name=name, strict=strict)
    report = None
    # Of the processes that torchrun starts, one speaks for all.
    if launched.run is not None and os.environ.get("RANK", "0") == "0" and (check or not quiet):
        report = _judged(launched.run, launched.lost, quiet=quiet, strict=strict)
    raise SystemExit(launched.exit_code or (report.exit_code if check and report is not None else 0))


def _judged(path: Path, lost: str, *, quiet: bool, strict: bool) -> Report | None:
    """The verdict, drawn on stderr. The training is over: nothing here may change how it ended."""
    if lost and not path.is_dir():
        click.echo(f"sonde: {printable(lost)}: there is nothing left to judge.", err=True)
        return None
    try:
        from rich.text import Text

        from sonde.cli._terminal import diagnose_with_progress, open_terminal
        from sonde.render.terminal.report_terminal import TerminalReport

        report = diagnose_with_progress(path)
        if not quiet and (report.run.num_steps or report.findings):
            open_terminal(stderr=True).print(TerminalReport(report))
        elif not quiet and not lost:  # most scripts are no trainings: then one line is enough
            open_terminal(stderr=True).print(Text(printable(report.why_unknown)))
        if lost:
            click.echo(f"sonde: {printable(lost)}: what is said of it, here and later, is about the rest.", err=True)
    except Exception as error:
        if strict:
            raise

        reason = printable(f"{type(error).__name__}: {error}")
        click.echo(f"sonde: the run was kept, but judging it failed: {reason}", err=True)
        click.echo(f"       Again with: sonde diagnose {printable(path)}", err=True)
        return None
    return report
