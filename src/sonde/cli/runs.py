"""`sonde runs`: the recorded runs with their verdicts."""

from pathlib import Path

import click

from sonde.cli._terminal import open_terminal


@click.command()
@click.argument("directory", type=click.Path(path_type=Path), required=False)
@click.option("-n", "--number", default=20, show_default=True, type=click.IntRange(1), help="Number of runs, newest first.")
def runs(directory: Path | None, number: int) -> None:
    """List runs with their verdicts, newest first.

    Verdicts are cached beside the log of each run. Runs without a cached verdict are judged for at most 2 s in all.

    \b
    Example:  sonde runs                 (those in runs/)
              sonde runs old/runs -n 5
    """
    from sonde.config import load_config
    from sonde.errors import NoRunError
    from sonde.render.terminal.run_list import RunList
    from sonde.report.verdict_cache import list_runs
    from sonde.runlog.run_directory import runs_in

    parent = directory or Path(load_config().output_dir)
    paths = runs_in(parent)
    if not paths:
        where = f"in {parent}" if parent.is_dir() else f"here: there is no directory {parent}"
        raise NoRunError(f"no run {where}.\nRecord one: sonde run train.py")
    open_terminal().print(RunList(list_runs(paths[:number]), num_more=len(paths[number:])))
