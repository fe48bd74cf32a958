"""Errors of Sonde never reach the training: they are counted, and a probe that keeps failing is disabled and reported."""

import logging
from collections import Counter
from collections.abc import Callable

MAX_FAILURES = 3  # of a probe at one place: then it is disabled there

_log = logging.getLogger("sonde")


class ErrorIsolation:
    """Counts the errors of probes, disables those that keep failing, and reports each once. `on_disabled(probe, where, error)` records it
    in the run. With `strict`, every error is raised again."""

    def __init__(self, on_disabled: Callable[[str, str, str], None], *, strict: bool) -> None:
        self._on_disabled, self._strict = on_disabled, strict
        self.counts: Counter[tuple[str, str]] = Counter()
        self.disabled: set[tuple[str, str]] = set()

    def is_disabled(self, probe: str, where: str = "") -> bool:
        return (probe, where) in self.disabled

    def report(self, probe: str, where: str, error: Exception) -> None:
        """A probe failed, at this layer or call."""
        if self._strict:
            raise error
        key = (probe, where)
        self.counts[key] += 1
        if self.counts[key] < MAX_FAILURES or key in self.disabled:
            return
        self.disabled.add(key)
        try:
            text = f"{type(error).__name__}: {error}"[:500]
            place = f" at {where}" if where else ""
            _log.warning("sonde: the probe %r failed%s and was disabled (%s). Training goes on.", probe, place, text)
            self._on_disabled(probe, where, text)
        except Exception:
            # Even reporting failed (no memory, for instance). The training matters more than the message.
            _log.debug("sonde: could not record a disabled probe", exc_info=True)
