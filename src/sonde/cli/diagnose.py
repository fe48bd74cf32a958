"""`sonde diagnose`: the verdict on a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sonde.cli._run_argument import run_argument, run_path
from sonde.cli._terminal import open_terminal
from sonde.errors import SondeError

if TYPE_CHECKING:
    from sonde.report import Report
    from sonde.runlog.reader import Run


@click.command()
@run_argument
@click.option("--against", metavar="BASELINE", help="Tell too in what it departs from a baseline (see: sonde baseline).")
@click.option("--within", type=float, help="How far it may depart: a share, 0.1 where nothing is given.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document for programs.")
def diagnose(run: str | None, against: str | None, within: float | None, as_json: bool) -> None:
    """Say what is wrong with a run, and why.

    \b
    Example:  sonde diagnose                  (the newest run)
              sonde diagnose runs/base
              sonde diagnose runs/base --json | jq '.findings[0]'
              sonde diagnose --against baseline.json

    Exit code 0: healthy, or nothing could be told. 1: problems were found.
    """
    from sonde.runlog.reader import Run

    source = Run(run_path(run))
    report = _report(source, against, within)
    if as_json:
        click.echo(report.to_json())
    else:
        from sonde.render.terminal.report_terminal import TerminalReport

        open_terminal().print(TerminalReport(report, source))
    raise SystemExit(report.exit_code)


def _report(run: Run, against: str | None, within: float | None) -> Report:
    if against is None:
        if within is not None:
            raise SondeError("--within says how far a run may depart from a baseline: name it with --against BASELINE.")
        from sonde.report import diagnose

        return diagnose(run)
    from sonde.comparison.baseline import load
    from sonde.comparison.departure import TOLERANCE, judge_against

    return judge_against(run, load(against), tolerance=TOLERANCE if within is None else within)
