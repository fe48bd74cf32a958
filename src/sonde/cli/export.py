"""`sonde export`: writes a run in the format of another tool."""

import difflib
from importlib import import_module
from pathlib import Path

import click

from sonde.cli._run_argument import run_argument, run_path
from sonde.errors import SondeError
from sonde.export import EXPORTERS


@click.command()
@run_argument
@click.option("--to", "target", required=True, metavar="FORMAT", help=f"One of: {', '.join(EXPORTERS)}.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file to write.  [default: beside the run's log]")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def export(run: str | None, target: str, output: Path | None, force: bool) -> None:
    """Write a run in the format of another tool.

    \b
    perfetto   steps, phases, events and curves over time, for ui.perfetto.dev
    parquet    all numbers by column, beside the log (as sonde compact)

    \b
    Example:  sonde export --to perfetto                          (the newest run)
              sonde export runs/base --to perfetto -o base.json.gz
    """
    if target not in EXPORTERS:
        near = difflib.get_close_matches(target, EXPORTERS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise SondeError(f"Sonde cannot export to {target!r}.{hint}\nIt can export to: {', '.join(EXPORTERS)}")
    from sonde.formatting import printable
    from sonde.runlog.run_reader import Run

    exporter = import_module(f"sonde.export.{target}")
    for path in exporter.export(Run(run_path(run)), output, replace=force):
        click.echo(printable(path))
