"""`sonde report`: writes the verdict on a run to a file."""

from pathlib import Path

import click

from sonde.cli._run_argument import run_argument, run_path
from sonde.cli._terminal import check_format, write_output


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
    suffix = check_format(output)
    from sonde.render.html.report_html import report_html
    from sonde.render.report_markdown import report_markdown
    from sonde.report import diagnose
    from sonde.runlog.run_reader import Run

    source = Run(run_path(run))
    verdict = diagnose(source)
    if suffix == ".html":
        text = report_html([(verdict, source)])
    else:
        text = report_markdown(verdict) if suffix == ".md" else verdict.to_json()
    write_output(output, text, replace=force)
