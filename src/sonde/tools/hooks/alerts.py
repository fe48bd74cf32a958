"""Alerts: said to the log and to whoever asked for them. The same alert again is counted, and said again at its 10th, 100th … time."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace

from sonde.errors import SondeError
from sonde.rules.words import number
from sonde.tools.hooks.hook import AlertSeverity
from sonde.tools.hooks.webhook import LAST_WAIT_S, TIMEOUT_S, Webhook
from sonde.views.printable import printable

MAX_KINDS = 1000  # different alerts that are remembered; of more, the oldest are forgotten
LEVELS = {
    AlertSeverity.INFO: logging.INFO,
    AlertSeverity.WARNING: logging.WARNING,
    AlertSeverity.ERROR: logging.ERROR,
    AlertSeverity.CRITICAL: logging.CRITICAL,
}

_log = logging.getLogger("sonde")


@dataclass(frozen=True, slots=True)
class Alert:
    """Something that somebody asked to be told."""

    severity: AlertSeverity
    message: str
    hook: str
    where: str  # the layer, "" for the whole model
    step: int  # at which it was first said
    evidence: Mapping[str, float | str] = field(default_factory=dict)  # of the last time
    count: int = 1
    last_step: int = 0
    time_s: float = 0.0  # since the epoch, of the first time

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        numbers = in_words(self.evidence)
        again = f", {self.count} times since step {self.step}" if self.count > 1 else ""
        return f"{self.message}{place} in step {self.last_step}{f' ({numbers})' if numbers else ''}{again}"


@dataclass(frozen=True, slots=True)
class _Sink:
    tell: Callable[[Alert], object]
    at_least: AlertSeverity
    webhook: Webhook | None = None


def in_words(evidence: Mapping[str, float | str]) -> str:
    """`l2 12.3, nan 4`"""
    return ", ".join(f"{name} {value if isinstance(value, str) else number(value)}" for name, value in evidence.items())


class Alerts:
    """Where alerts go. What a listener raises is logged once and never reaches the training."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str, str], Alert] = OrderedDict()
        self._unsaid: set[tuple[str, str, str]] = set()  # repeated since they were last said
        self._sinks: list[_Sink] = []
        self._silenced: set[int] = set()  # sinks whose failure was told
        self._lock = threading.Lock()

    @property
    def history(self) -> list[Alert]:
        """Every alert once, with its count, oldest first."""
        with self._lock:
            return list(self._known.values())

    @property
    def webhooks(self) -> list[Webhook]:
        return [sink.webhook for sink in self._sinks if sink.webhook is not None]

    def send_to(self, target: Callable[[Alert], object] | str, *, at_least: AlertSeverity, timeout_s: float = TIMEOUT_S) -> None:
        """A function that takes an `Alert`, or a web address that gets it as JSON."""
        if callable(target):
            self._sinks.append(_Sink(target, at_least))
        elif isinstance(target, str):
            webhook = Webhook(target, timeout_s=timeout_s)
            self._sinks.append(_Sink(lambda alert: webhook.send(asdict(alert) | {"text": str(alert)}), at_least, webhook))
        else:
            raise SondeError(f"alerts go to a function or to a web address, not to {type(target).__name__}.")

    def give(self, alert: Alert) -> Alert:
        """Say it, or count it where it was said before. Returns the alert with its count."""
        key = (alert.hook, alert.where, alert.message)
        with self._lock:
            before = self._known.get(key)
            if before is None:
                alert = replace(alert, last_step=alert.step, time_s=time.time())
            else:
                alert = replace(before, last_step=alert.step, evidence=alert.evidence, count=before.count + 1)
            self._known[key] = alert
            if len(self._known) > MAX_KINDS:
                self._unsaid.discard(self._known.popitem(last=False)[0])
            is_news = _is_power_of_ten(alert.count)
            (self._unsaid.discard if is_news else self._unsaid.add)(key)
        if is_news:
            self._say(alert)
        return alert

    def close(self) -> None:
        """Say what was only counted, and give webhooks a moment to send it."""
        with self._lock:
            rest = [self._known[key] for key in self._known if key in self._unsaid]
            self._unsaid.clear()
        for alert in rest:
            self._say(alert)
        for webhook in self.webhooks:
            webhook.wait(LAST_WAIT_S)

    def _say(self, alert: Alert) -> None:
        _log.log(LEVELS[alert.severity], "sonde: %s: %s", alert.hook, printable(alert))
        for sink in self._sinks:
            if alert.severity.rank < sink.at_least.rank:
                continue
            try:
                sink.tell(alert)
            except Exception as error:
                if id(sink) not in self._silenced:
                    self._silenced.add(id(sink))
                    _log.warning("sonde: a listener for alerts failed (%s: %s). Training goes on.", type(error).__name__, error)


def _is_power_of_ten(count: int) -> bool:
    while count % 10 == 0:
        count //= 10
    return count == 1
