"""A log file that is rotated by size, so that a long training cannot fill the disk."""

from __future__ import annotations

import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path

from sonde.errors import SondeError
from sonde.views.plots.plot import make_folder
from sonde.views.printable import printable

MAX_BYTES = 8 * 2**20  # of one file
NUM_OLD = 3  # earlier files: name.1 to name.3

_log = logging.getLogger("sonde")


class RotatingFile(RotatingFileHandler):
    """Writes lines to a file and at most `NUM_OLD` earlier ones. A disk error ends the file with one warning, not the training."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        make_folder(path.parent)
        if path.is_symlink() or path.is_dir():
            raise SondeError(f"{printable(path)} is a {'symbolic link' if path.is_symlink() else 'directory'}; Sonde writes a file there.")
        try:
            super().__init__(path, maxBytes=max_bytes, backupCount=NUM_OLD, encoding="utf-8", errors="backslashreplace", delay=True)
        except OSError as error:
            raise SondeError(f"{printable(path)} cannot be written: {error.strerror or error}.") from None
        self.path = path
        self._has_failed = False

    def write_line(self, line: str) -> None:
        """Write a line without a logger."""
        self.handle(logging.LogRecord("sonde", logging.INFO, "", 0, line, None, None))

    def emit(self, record: logging.LogRecord) -> None:
        if not self._has_failed:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        self._has_failed = True
        _log.warning("sonde: %s cannot be written; it ends here.", printable(self.path))
