"""The argument RUN of the commands that read a run: a directory, a name, or the newest run where it is left out."""

from pathlib import Path

import click

run_argument = click.argument("run", required=False, metavar="[RUN]")


def run_path(run: str | None) -> Path:
    """The directory of the run that the user named, or of the newest one."""
    from sonde.config import load_config
    from sonde.runlog.run_directory import find_run

    return find_run(run, Path(load_config().output_dir))
