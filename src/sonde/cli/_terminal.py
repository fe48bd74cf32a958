"""Output of the commands: the terminal, files, and a progress line while a long run is judged."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from sonde.errors import SondeError
from sonde.formatting import printable

if TYPE_CHECKING:
    from pathlib import Path

    from sonde.render.terminal.print_to_terminal import Terminal
    from sonde.report import Report

PROGRESS_AFTER_S = 2.0  # a shorter wait needs no explanation
FORMATS = (".html", ".md", ".json")
ERASE_LINE = "\r\x1b[K"


def open_terminal(*, stderr: bool = False, is_wide: bool = False) -> Terminal:
    """A console on stdout or stderr, `is_wide` for tables that use the whole width of the terminal. Characters that the locale cannot
    encode are written as escapes."""
    from sonde.render.terminal.print_to_terminal import WIDEST, Terminal

    stream = sys.stderr if stderr else sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")
    return Terminal(stream, widest=sys.maxsize if is_wide else WIDEST)


def diagnose_with_progress(path: Path) -> Report:
    """Judge a run and cache its verdict. On a terminal, a line on stderr says what is done after two seconds."""
    from sonde.report import diagnose
    from sonde.report.verdict_cache import write_verdict
    from sonde.runlog.run_reader import Run

    with progress_line("reading the log") as show:
        run = Run(path)
        show(f"judging {run.last_step + 1:,} steps")
        report = diagnose(run)
    write_verdict(run, report)
    return report


def check_format(output: Path) -> str:
    """The suffix of a file that a report can be written to."""
    if (suffix := output.suffix.lower()) not in FORMATS:
        raise SondeError(f"{output} ends in none of {', '.join(FORMATS)}, which select the format.")
    return suffix


def write_output(output: Path | None, text: str, *, replace: bool) -> None:
    """Write a file and print its name, or print the text itself."""
    if output is None:
        click.echo(text, nl=False)
        return
    from sonde.render.safe_write import write_new

    write_new(output, text, replace=replace)
    click.echo(printable(output))


@contextmanager
def progress_line(text: str, after_s: float = PROGRESS_AFTER_S) -> Iterator[Callable[[str], None]]:
    """Show `sonde: TEXT ...` on stderr while the block runs, if that takes longer than `after_s`. Nothing where stderr is no terminal.

    Yields a function that changes the text.
    """
    if sys.stderr is None or not sys.stderr.isatty():  # None: the process was started with a closed stderr
        yield lambda text: None
        return
    lock, is_shown, texts = threading.Lock(), threading.Event(), [text]

    def show() -> None:
        with lock:
            is_shown.set()
            click.echo(f"{ERASE_LINE}sonde: {texts[-1]} ...", nl=False, err=True, color=True)

    def change(text: str) -> None:
        texts.append(text)
        if is_shown.is_set():
            show()

    timer = threading.Timer(after_s, show)
    timer.daemon = True
    timer.start()
    try:
        yield change
    finally:
        timer.cancel()
        timer.join()  # the line is erased after it was written, never before
        if is_shown.is_set():
            click.echo(ERASE_LINE, nl=False, err=True, color=True)
