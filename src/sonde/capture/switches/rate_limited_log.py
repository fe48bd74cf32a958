"""Writes the log lines of switches to the logger `sonde.<switch>`, a few per second each.

They go to the handlers that the user configured for logging, or else to stderr.
"""

import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

from sonde.formatting import printable, strict

PAUSE_NS = 500_000_000  # between two lines of one switch: nobody reads faster
FIRST = 3  # lines without a pause


class _Stderr(logging.StreamHandler[Any]):
    """Writes to the current `sys.stderr`, which may have been replaced since the import."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class SwitchLog:
    """Writes the log lines of one switch, a few per second."""

    def __init__(self, switch: str, *, as_json: bool) -> None:
        self._log = logging.getLogger(f"sonde.{switch}")
        self._switch, self._as_json = switch, as_json
        self._num, self._num_skipped, self._next_ns = 0, 0, 0
        self._level: int | None = None

    def open(self, *, at_once: bool) -> None:
        """`at_once`: the next line is written without a pause, because a person waits for it."""
        if at_once:
            self._next_ns = 0
        if self._log.level == logging.NOTSET:  # otherwise the user has set a level
            self._level = self._log.level
            self._log.setLevel(logging.INFO)

    def write(self, step: int, data: Mapping[str, Any], now_ns: int, is_urgent: bool = False) -> bool:
        """Write a line, unless one was written just now and it is not urgent: then it is counted for the next line. Returns whether it was
        written."""
        if self._num >= FIRST and now_ns < self._next_ns and not is_urgent:
            self._num_skipped += 1
            return False
        self._num += 1
        self._next_ns = now_ns + PAUSE_NS
        fields = dict(data) | ({"steps_since_last_line": self._num_skipped + 1} if self._num_skipped else {})
        self._num_skipped = 0
        if self._log.isEnabledFor(logging.INFO):
            line = {"switch": self._switch, "step": step, **fields}
            plain = f"sonde: {self._switch}, step {step}: " + ", ".join(f"{name} {_format(value)}" for name, value in fields.items())
            text, extra = json.dumps(strict(line)) if self._as_json else plain, {"sonde": {"step": step, **fields}}
            record = self._log.makeRecord(self._log.name, logging.INFO, "", 0, "%s", (text,), None, extra=extra)
            (self._log if self._log.hasHandlers() else _Stderr()).handle(record)
        return True

    def close(self) -> None:
        if self._level is not None:
            self._log.setLevel(self._level)
            self._level = None


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
    if isinstance(value, Mapping):
        return " ".join(f"{name}:{_format(item)}" for name, item in value.items()) or "none"
    return printable(value)
