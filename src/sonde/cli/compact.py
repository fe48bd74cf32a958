"""`sonde compact`: a closed run as Parquet."""

from __future__ import annotations

import click

from sonde.cli._run_argument import run_argument, run_path


@click.command()
@run_argument
def compact(run: str | None) -> None:
    """Write the facts of a closed run as Parquet files beside its log.

    The log stays the truth and is not touched; Parquet is for reading by column with other tools.

    \b
    Example:  sonde compact                (the newest run)
              sonde compact runs/base
    """
    from sonde.formatting import printable
    from sonde.runlog.parquet import compact as to_parquet

    for path in to_parquet(run_path(run)):
        click.echo(printable(path))
