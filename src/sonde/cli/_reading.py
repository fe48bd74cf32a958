"""What the reading commands share: which run is meant, and how a screen is printed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from sonde.views.terminal import Terminal

run_argument = click.argument("run", required=False, metavar="[RUN]")


def run_path(run: str | None) -> Path:
    """The run that the user named, or the newest one where runs are kept."""
    from sonde.config import load_config
    from sonde.runlog.directory import find_run

    return find_run(run, Path(load_config().output_dir))


def screen(*, stderr: bool = False) -> Terminal:
    """What the views draw on, at ease with any locale."""
    from sonde.views.terminal import Terminal

    stream = sys.stderr if stderr else sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")
    return Terminal(stream)
