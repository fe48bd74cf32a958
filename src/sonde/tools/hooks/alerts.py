"""Delivers alerts to the log, to functions and to web addresses. A repeated alert is delivered at its 1st, 10th, 100th … time."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace

from sonde.errors import SondeError
from sonde.rules.words import number
from sonde.tools.hooks.hook_spec import AlertSeverity
from sonde.tools.hooks.webhook import LAST_WAIT_S, TIMEOUT_S, Webhook
from sonde.views.printable import printable

MAX_KINDS = 1000  # different alerts that are stored; the oldest are dropped
LEVELS = {
    AlertSeverity.INFO: logging.INFO,
    AlertSeverity.WARNING: logging.WARNING,
    AlertSeverity.ERROR: logging.ERROR,
    AlertSeverity.CRITICAL: logging.CRITICAL,
}

_log = logging.getLogger("sonde")


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert, with the number of times it was raised."""

    severity: AlertSeverity
    message: str
    hook: str
    where: str  # the layer; "" for the whole model
    step: int  # of the first time
    evidence: Mapping[str, float | str] = field(default_factory=dict)  # values of the last time
    count: int = 1
    last_step: int = 0
    time_s: float = 0.0  # since the epoch, of the first time

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        numbers = format_evidence(self.evidence)
        again = f", {self.count} times since step {self.step}" if self.count > 1 else ""
        return f"{self.message}{place} in step {self.last_step}{f' ({numbers})' if numbers else ''}{again}"


@dataclass(frozen=True, slots=True)
class _Sink:
    """A receiver of alerts from a severity on."""

    send: Callable[[Alert], object]
    at_least: AlertSeverity
    webhook: Webhook | None = None


def format_evidence(evidence: Mapping[str, float | str]) -> str:
    """The values as text: `l2 12.3, nan 4`."""
    return ", ".join(f"{name} {value if isinstance(value, str) else number(value)}" for name, value in evidence.items())


class AlertDispatcher:
    """Counts alerts and delivers them. An exception in a receiver is logged once and never reaches the training."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str, str], Alert] = OrderedDict()
        self._undelivered: set[tuple[str, str, str]] = set()  # raised again since the last delivery
        self._sinks: list[_Sink] = []
        self._failed: set[int] = set()  # ids of sinks with a logged failure
        self._lock = threading.Lock()

    @property
    def history(self) -> list[Alert]:
        """Every alert once, with its count, oldest first."""
        with self._lock:
            return list(self._known.values())

    @property
    def webhooks(self) -> list[Webhook]:
        """The receivers that are web addresses."""
        return [sink.webhook for sink in self._sinks if sink.webhook is not None]

    def send_to(self, target: Callable[[Alert], object] | str, *, at_least: AlertSeverity, timeout_s: float = TIMEOUT_S) -> None:
        """Adds a receiver: a function that takes an `Alert`, or a web address that receives it as JSON."""
        if callable(target):
            self._sinks.append(_Sink(target, at_least))
        elif isinstance(target, str):
            webhook = Webhook(target, timeout_s=timeout_s)
            self._sinks.append(_Sink(lambda alert: webhook.send(asdict(alert) | {"text": str(alert)}), at_least, webhook))
        else:
            raise SondeError(f"alerts go to a function or to a web address, not to {type(target).__name__}.")

    def emit(self, alert: Alert) -> Alert:
        """Delivers a new alert, or counts a repeated one. Returns the alert with its count."""
        key = (alert.hook, alert.where, alert.message)
        with self._lock:
            earlier = self._known.get(key)
            if earlier is None:
                alert = replace(alert, last_step=alert.step, time_s=time.time())
            else:
                alert = replace(earlier, last_step=alert.step, evidence=alert.evidence, count=earlier.count + 1)
            self._known[key] = alert
            if len(self._known) > MAX_KINDS:
                self._undelivered.discard(self._known.popitem(last=False)[0])
            is_delivered = _is_power_of_ten(alert.count)
            (self._undelivered.discard if is_delivered else self._undelivered.add)(key)
        if is_delivered:
            self._deliver(alert)
        return alert

    def close(self) -> None:
        """Delivers alerts that were only counted since their last delivery, and waits briefly for webhooks."""
        with self._lock:
            rest = [self._known[key] for key in self._known if key in self._undelivered]
            self._undelivered.clear()
        for alert in rest:
            self._deliver(alert)
        for webhook in self.webhooks:
            webhook.wait(LAST_WAIT_S)

    def _deliver(self, alert: Alert) -> None:
        _log.log(LEVELS[alert.severity], "sonde: %s: %s", alert.hook, printable(alert))
        for sink in self._sinks:
            if alert.severity.rank < sink.at_least.rank:
                continue
            try:
                sink.send(alert)
            except Exception as error:
                if id(sink) not in self._failed:
                    self._failed.add(id(sink))
                    _log.warning("sonde: a receiver of alerts failed (%s: %s). Training continues.", type(error).__name__, error)


def _is_power_of_ten(count: int) -> bool:
    while count % 10 == 0:
        count //= 10
    return count == 1
