"""`sonde runs`: what was recorded here."""

from __future__ import annotations

from pathlib import Path

import click

from sonde.cli._terminal import open_terminal


@click.command()
@click.argument("directory", type=click.Path(path_type=Path), required=False)
@click.option("-n", "--number", default=20, show_default=True, type=click.IntRange(1), help="How many, newest first.")
def runs(directory: Path | None, number: int) -> None:
    """List the runs in a directory, newest first.

    \b
    Example:  sonde runs                 (those in runs/)
              sonde runs old/runs -n 5
    """
    from sonde.config import load_config
    from sonde.errors import NoRunError, SondeError
    from sonde.render.terminal.run_list import RunList
    from sonde.runlog.directory import runs_in
    from sonde.runlog.reader import Run

    parent = directory or Path(load_config().output_dir)
    paths = runs_in(parent)
    if not paths:
        where = f"in {parent}" if parent.is_dir() else f"here: there is no directory {parent}"
        raise NoRunError(f"no run {where}.\nRecord one: sonde run train.py")
    rows: list[tuple[str, Run | str]] = []
    for path in paths[:number]:
        try:
            rows.append((path.name, Run(path)))
        except SondeError as error:
            rows.append((path.name, str(error)))
    open_terminal().print(RunList(rows, num_more=len(paths) - len(rows)))
