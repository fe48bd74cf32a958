"""`sonde report`: the verdict as a file."""

from __future__ import annotations

from pathlib import Path

import click

from sonde.cli._run_argument import run_argument, run_path
from sonde.errors import SondeError
from sonde.formatting import printable

FORMATS = (".html", ".md", ".json")


@click.command()
@run_argument
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The file: .html, .md or .json.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def report(run: str | None, output: Path, force: bool) -> None:
    """Write the verdict on a run to one self-contained file.

    \b
    Example:  sonde report -o report.html             (the newest run)
              sonde report runs/base -o base.md --force
    """
    if output.suffix.lower() not in FORMATS:
        raise SondeError(f"{output} ends in none of {', '.join(FORMATS)}: Sonde tells the format by it.")
    from sonde.render.safe_write import write_new
    from sonde.report import diagnose
    from sonde.runlog.reader import Run

    source = Run(run_path(run))
    verdict = diagnose(source)
    match output.suffix.lower():
        case ".html":
            from sonde.render.html.report_html import report_html

            text = report_html([(verdict, source)])
        case ".md":
            from sonde.render.markdown import report_markdown

            text = report_markdown(verdict)
        case _:
            text = verdict.to_json()
    write_new(output, text, replace=force)
    click.echo(printable(output))
