"""The progress line: on a terminal only, after a while only, and gone before anything else is printed."""

import contextlib
import io
import sys
import threading

from sonde.cli._terminal import ERASE_LINE, progress_line


class Stream(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.is_terminal, self.written = is_terminal, threading.Event()

    def isatty(self):
        return self.is_terminal

    def flush(self):
        self.written.set()


def as_stderr(monkeypatch, *, is_terminal=True):
    """In the test itself: pytest sets sys.stderr again after the fixtures."""
    stream = Stream(is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_a_long_wait_is_explained_and_the_line_is_erased(monkeypatch):
    stderr = as_stderr(monkeypatch)
    with progress_line("judging 1,000 steps", after_s=0.0):
        assert stderr.written.wait(60)
        assert stderr.getvalue() == f"{ERASE_LINE}sonde: judging 1,000 steps ..."
    assert stderr.getvalue() == f"{ERASE_LINE}sonde: judging 1,000 steps ...{ERASE_LINE}"


def test_the_text_can_change(monkeypatch):
    stderr = as_stderr(monkeypatch)
    with progress_line("reading the log", after_s=0.0) as show:
        assert stderr.written.wait(60)
        show("judging 7 steps")
        assert stderr.getvalue().endswith(f"{ERASE_LINE}sonde: judging 7 steps ...")


def test_an_error_erases_the_line_too(monkeypatch):
    stderr = as_stderr(monkeypatch)
    with contextlib.suppress(ValueError), progress_line("judging", after_s=0.0):
        assert stderr.written.wait(60)
        raise ValueError
    assert stderr.getvalue().endswith(ERASE_LINE)


def test_a_short_wait_shows_nothing(monkeypatch):
    stderr = as_stderr(monkeypatch)
    with progress_line("judging", after_s=600):
        pass
    assert stderr.getvalue() == ""


def test_nothing_is_shown_where_stderr_is_no_terminal(monkeypatch):
    stderr = as_stderr(monkeypatch, is_terminal=False)
    with progress_line("judging", after_s=0.0):
        pass
    assert stderr.getvalue() == ""
