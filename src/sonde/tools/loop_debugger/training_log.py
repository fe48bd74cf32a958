"""The log of a training: one line of `name=value` per step, not more often than a person reads, in a file and on the terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from sonde.errors import SondeError
from sonde.rules.words import number
from sonde.views.file import file_name
from sonde.views.plots.plot import make_folder
from sonde.views.printable import printable

EVERY_S = 1.0  # between two lines of ordinary steps; what is out of the ordinary is always told
FORMAT = "%(asctime)s %(levelname)s %(message)s"


class TrainingLog:
    """A logger of its own with its own handlers; loggers of the user's, the root among them, are left alone."""

    def __init__(self, name: str, directory: Path) -> None:
        if not isinstance(name, str) or not name.strip():
            raise SondeError(f'a log needs a name, for instance setup_training_logging("resnet"); this is {name!r}.')
        make_folder(directory)
        self.path = directory / file_name(name, "log")
        self.logger = logging.getLogger(f"sonde.training.{name}")
        self.logger.setLevel(logging.INFO)
        self.logger.propagate = False  # or lines would come twice where the root has a handler
        self._last = -EVERY_S
        try:
            written: logging.Handler = logging.FileHandler(self.path, encoding="utf-8", errors="backslashreplace", delay=True)
        except OSError as error:
            raise SondeError(f"{printable(self.path)} cannot be written: {error.strerror or error}.") from None
        self._handlers = [written, logging.StreamHandler(sys.stdout)]
        for handler in self._handlers:
            handler.setFormatter(logging.Formatter(FORMAT))
            self.logger.addHandler(handler)

    def step(self, values: Mapping[str, Any]) -> None:
        now = monotonic()
        if now - self._last >= EVERY_S:
            self._last = now
            self.logger.info(" ".join(f"{name}={_short(value)}" for name, value in values.items() if value is not None))

    def warning(self, sentence: str) -> None:
        self.logger.warning("%s", printable(sentence))

    def close(self) -> None:
        for handler in self._handlers:
            self.logger.removeHandler(handler)
            handler.close()


def _short(value: Any) -> str:
    return number(value) if isinstance(value, (int, float)) else printable(value)
