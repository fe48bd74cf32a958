"""The log of a training: one line of `name=value` per batch in a file that is rotated by size, and some of the lines on the terminal."""

import logging
import sys
from collections.abc import Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from time import monotonic
from typing import Any

from sonde.errors import SondeError
from sonde.formatting import number, printable
from sonde.render.safe_write import file_name, make_folder

MAX_BYTES = 8 * 2**20  # of one file
NUM_OLD = 3  # earlier files: name.1 to name.3

_log = logging.getLogger("sonde")


class RotatingFile(RotatingFileHandler):
    """Writes lines to a file and at most `NUM_OLD` earlier ones. A disk error ends the file with one warning, not the training."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        make_folder(path.parent)
        if path.is_symlink() or path.is_dir():
            raise SondeError(f"{printable(path)} is a {'symbolic link' if path.is_symlink() else 'directory'}; Sonde writes a file there.")
        super().__init__(path, maxBytes=max_bytes, backupCount=NUM_OLD, encoding="utf-8", errors="backslashreplace", delay=True)
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


TERMINAL_INTERVAL_S = 1.0  # between two lines on the terminal; warnings are always printed
FORMAT = "%(asctime)s %(levelname)s %(message)s"


class TrainingLogger:
    """Writes metrics of batches and warnings to `<directory>/<name>.log`, rotated by size, and to the terminal. It has a logger and
    handlers of its own; loggers of the user, the root logger included, are not changed."""

    def __init__(self, name: str, directory: Path, *, interval_s: float = 0.0) -> None:
        if not isinstance(name, str) or not name.strip():
            raise SondeError(f'a log needs a name, for instance setup_training_logging("resnet"); this is {name!r}.')
        if isinstance(interval_s, bool) or not isinstance(interval_s, (int, float)) or not interval_s >= 0:
            raise SondeError(f"interval_s must be a number of seconds from 0 on, not {interval_s!r}.")
        self._file = RotatingFile(directory / file_name(name, "log"))
        self.path = self._file.path
        self.logger = logging.getLogger(f"sonde.training.{name}")
        self.logger.setLevel(logging.INFO)
        self.logger.propagate = False  # a handler of the root logger would print each line a second time
        self._terminal = logging.StreamHandler(sys.stdout)
        for handler in (self._file, self._terminal):
            handler.setFormatter(logging.Formatter(FORMAT))
            self.logger.addHandler(handler)
        self._terminal.addFilter(_Interval(TERMINAL_INTERVAL_S))
        self._file.addFilter(_Interval(interval_s))

    def log_batch_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Write one line for a batch, with these values by name."""
        if not isinstance(metrics, Mapping):
            raise SondeError(f'log_batch_metrics takes values by name, for instance {{"loss": 0.5}}, not a {type(metrics).__name__}.')
        self.logger.info("%s", " ".join(f"{printable(name)}={_format(value)}" for name, value in metrics.items()))

    def warning(self, sentence: str) -> None:
        self.logger.warning("%s", printable(sentence))

    def close(self) -> None:
        """Close the file. Closing twice is fine."""
        for handler in (self._file, self._terminal):
            self.logger.removeHandler(handler)
            handler.close()


class _Interval(logging.Filter):
    """Drops a record that follows less than `interval_s` after the last one; warnings pass."""

    def __init__(self, interval_s: float) -> None:
        super().__init__()
        self._interval_s, self._last_s = interval_s, -interval_s

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING or not self._interval_s:
            return True
        now_s = monotonic()
        if now_s - self._last_s < self._interval_s:
            return False
        self._last_s = now_s
        return True


def _format(value: Any) -> str:
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()  # a tensor or an array of one number
    return number(value) if isinstance(value, (int, float)) else printable(value)
