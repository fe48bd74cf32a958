"""`sonde compact`: writes a run as Parquet files."""

import click

from sonde.cli._run_argument import run_argument, run_path


@click.command()
@run_argument
def compact(run: str | None) -> None:
    """Write a run that has ended as Parquet files beside its log.

    Other tools can read Parquet by column. The log is not changed.

    \b
    Example:  sonde compact                (the newest run)
              sonde compact runs/base
    """
    from sonde.export.parquet import compact as to_parquet
    from sonde.formatting import printable

    for path in to_parquet(run_path(run)):
        click.echo(printable(path))
