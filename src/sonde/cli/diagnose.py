"""`sonde diagnose`: the verdict on a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sonde.cli._run_argument import run_argument, run_path
from sonde.cli._terminal import diagnose_with_progress, open_terminal
from sonde.errors import SondeError

if TYPE_CHECKING:
    from sonde.report import Report


@click.command()
@run_argument
@click.option("--follow", is_flag=True, help="Judge a run again while it grows, until it ends.")
@click.option("--against", metavar="BASELINE", help="Compare the run with a baseline too (see: sonde baseline).")
@click.option("--within", type=float, metavar="SHARE", help="Difference from the baseline that is accepted.  [default: 0.1]")
@click.option("--check", is_flag=True, help="Exit with 3 if the verdict is unknown, for use in CI.")
@click.option("-v", "--verbose", is_flag=True, help="List the rules that were not evaluated, with the reasons.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; with --follow, one per line for each judgement.")
def diagnose(run: str | None, follow: bool, against: str | None, within: float | None, check: bool, verbose: bool, as_json: bool) -> None:
    """Show what is wrong with a run, and why.

    With --follow, each finding is printed once, when it appears, and the verdict when the run has ended. The run is judged again when its
    log has grown by a tenth, at most every 10 s and with at most 5 % of one core. Ctrl-C stops following, not the training.

    \b
    Example:  sonde diagnose                  (the newest run)
              sonde diagnose runs/base --json | jq '.findings[0]'
              sonde diagnose --against baseline.json
              sonde diagnose --follow

    Exit code 0: no problems. 1: problems. 2: wrong usage. With --check also 3: unknown, too little was seen to judge.
    """
    path = run_path(run)
    if against is None and within is not None:
        raise SondeError("--within is the accepted difference from a baseline: name it with --against BASELINE.")
    if against is not None and follow:
        raise SondeError("--follow and --against cannot be combined: compare with the baseline when the run has ended.")
    if follow:
        report = _follow(path, as_json=as_json, verbose=verbose)
    else:
        report = diagnose_with_progress(path) if against is None else _report_against(path, against, within)
        _print(report, as_json=as_json, verbose=verbose)
    raise SystemExit(report.exit_code if check else int(report.verdict == "problems"))


def _print(report: Report, *, as_json: bool, verbose: bool) -> None:
    if as_json:
        click.echo(report.to_json())
    else:
        from sonde.render.terminal.report_terminal import TerminalReport

        open_terminal().print(TerminalReport(report, is_verbose=verbose))


def _report_against(path: Path, against: str, within: float | None) -> Report:
    from sonde.comparison.baseline_check import TOLERANCE, check_against_baseline
    from sonde.comparison.baseline_file import load

    return check_against_baseline(path, load(against), tolerance=TOLERANCE if within is None else within)


def _follow(path: Path, *, as_json: bool, verbose: bool) -> Report:
    from sonde.render.report_content import ending, in_place
    from sonde.render.terminal.print_to_terminal import line
    from sonde.render.terminal.report_terminal import TerminalFindings, TerminalReport
    from sonde.report.follow_run import follow, new_and_gone

    terminal = open_terminal()
    before: Report | None = None
    for report in follow(path):
        if as_json:
            click.echo(report.to_json(indent=None))
            continue
        if before is None and report.run.ended == "running":
            terminal.print(line((f"following {path} from step {report.run.last_step + 1:,}; Ctrl-C stops", "dim")))
        new, gone = new_and_gone(before.findings if before else (), report.findings)
        for finding in gone:
            terminal.print(line((f"not found any more at step {report.run.last_step:,}: {finding.rule}{in_place(finding, report)}", "dim")))
        if new:
            terminal.print(TerminalFindings(report, new))
        before = report
    if not as_json:
        terminal.print(line())
        terminal.print(line((f"the run has ended at step {report.run.last_step:,}: {ending(report)}", "bold")))
        terminal.print(TerminalReport(report, has_findings=False, is_verbose=verbose))
    return report
