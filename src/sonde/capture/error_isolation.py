"""Containment: an error of ours never reaches the training and never goes unsaid."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

NUM_CHANCES = 3  # a probe that raised so often at one place is taken out there

_log = logging.getLogger("sonde")


class Faults:
    """Counts what went wrong inside Sonde, retires what keeps failing, and says so once."""

    def __init__(self, tell: Callable[[str, str, str], None], *, strict: bool) -> None:
        self._tell = tell  # (probe, where, error): records a retirement in the run
        self._strict = strict
        self._counts: Counter[tuple[str, str]] = Counter()
        self.retired: set[tuple[str, str]] = set()

    def caught(self, probe: str, where: str, error: Exception) -> None:
        if self._strict:
            raise error
        key = (probe, where)
        self._counts[key] += 1
        if self._counts[key] < NUM_CHANCES or key in self.retired:
            return
        self.retired.add(key)
        try:
            text = f"{type(error).__name__}: {error}"[:500]
            place = f" at {where}" if where else ""
            _log.warning("sonde: the probe %r failed%s and was taken out (%s). Training goes on.", probe, place, text)
            self._tell(probe, where, text)
        except Exception:
            # Even telling failed (no memory, say). The training matters more than the message.
            _log.debug("sonde: could not record a retired probe", exc_info=True)
