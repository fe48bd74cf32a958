"""`sonde diagnose`: the verdict on a run."""

from __future__ import annotations

import click

from sonde.cli._reading import run_argument, run_path, screen


@click.command()
@run_argument
@click.option("--json", "as_json", is_flag=True, help="One JSON document for programs.")
def diagnose(run: str | None, as_json: bool) -> None:
    """Say what is wrong with a run, and why.

    \b
    Example:  sonde diagnose                  (the newest run)
              sonde diagnose runs/base
              sonde diagnose runs/base --json | jq '.findings[0]'

    Exit code 0: healthy, or nothing could be told. 1: problems were found.
    """
    from sonde.report import judge

    report = judge(run_path(run))
    if as_json:
        from sonde.views.json import render

        click.echo(render(report))
    else:
        from sonde.views.text import Verdict

        screen().print(Verdict(report))
    raise SystemExit(report.exit_code)
