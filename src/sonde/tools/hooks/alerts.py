"""Delivers alerts to the log, to functions and to web addresses. A repeated alert is delivered at its 1st, 10th, 100th … time."""

import atexit
import contextlib
import json
import logging
import os
import queue
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from sonde.errors import SondeError
from sonde.formatting import number_or_text, printable, strict
from sonde.tools.hooks.hook_builder import AlertSeverity

MAX_WAITING = 100  # alerts in the queue; more are dropped and counted
TIMEOUT_S = 5.0  # to connect, and for each response
IDLE_S = 5.0  # after which the thread ends; the next alert starts another
LAST_WAIT_S = 1.5  # at the end of the program, so that the last alert is still sent

_log = logging.getLogger("sonde")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: alerts go only to the host that the user named."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class Webhook:
    """POSTs JSON documents to one address. `send` never blocks."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        host = _host(url)
        if host is None:
            raise SondeError(f"a webhook needs an address that begins with http:// or https:// and names a host, not {url!r}.")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
            raise SondeError(f"timeout_s is a number of seconds, more than 0, not {timeout_s!r}.")
        self._url, self._timeout_s = url, timeout_s
        self.host = host  # safe to log: the path of an address often contains a secret
        self.num_sent = self.num_failed = self.num_dropped = 0
        self.last_error = ""
        self._reset()
        atexit.register(_wait_at_exit, weakref.ref(self))

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._waiting: queue.Queue[bytes] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._gave_up = False

    def send(self, document: Mapping[str, Any]) -> None:
        """Queues one document. If the queue is full, the document is dropped and counted."""
        body = json.dumps(strict(document), allow_nan=False).encode()
        if self._pid != os.getpid():
            self._reset()  # a forked child has no thread, and its lock may be held
        with self._lock:
            try:
                self._waiting.put_nowait(body)
            except queue.Full:
                self.num_dropped += 1
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_queued, name="sonde-webhook", daemon=True)
                self._thread.start()
            self._gave_up = False

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds` for the queue to empty, once. Returns True if all documents were sent or failed."""
        thread = self._thread
        if thread is None or self._pid != os.getpid():
            return True
        if self._gave_up:
            return False
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(b"")  # ends the thread without the idle time
        thread.join(seconds)
        self._gave_up = thread.is_alive()
        return not self._gave_up

    def _send_queued(self) -> None:
        opener = urllib.request.build_opener(_NoRedirect)
        while True:
            try:
                body = self._waiting.get(timeout=IDLE_S)
            except queue.Empty:
                body = b""
            if body:
                self._post(opener, body)
                continue
            with self._lock:
                if self._waiting.empty():  # checked under the lock: a later `send` starts another thread
                    self._thread = None
                    return

    def _post(self, opener: urllib.request.OpenerDirector, body: bytes) -> None:
        try:
            request = urllib.request.Request(self._url, body, {"Content-Type": "application/json", "User-Agent": "sonde"}, method="POST")
            with opener.open(request, timeout=self._timeout_s):
                self.num_sent += 1
        except (OSError, HTTPException, ValueError) as error:  # URLError and timeouts are OSErrors
            self.num_failed += 1
            code = error.code if isinstance(error, urllib.error.HTTPError) else None
            self.last_error = f"answered {code}" if code else f"{type(error).__name__}: {getattr(error, 'reason', error)}"
            if self.num_failed == 1:
                what = f"an alert could not be sent to {self.host} ({self.last_error})"
                _log.warning("sonde: %s. Training continues; further failures are only counted.", what)


def _host(url: object) -> str | None:
    """Scheme, host and port of a web address; None if it is not one."""
    if not isinstance(url, str) or not url.isprintable() or " " in url:
        return None
    try:
        parts = urlsplit(url)
        host = f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
    except ValueError:
        return None
    return host if parts.scheme in ("http", "https") and parts.hostname else None


_exit_times: list[float] = []  # the first is the start of the exit: all webhooks share one waiting time


def _wait_at_exit(ref: weakref.ref[Webhook]) -> None:
    webhook = ref()
    if webhook is not None:
        _exit_times.append(time.monotonic())
        webhook.wait(max(0.0, _exit_times[0] + LAST_WAIT_S - time.monotonic()))


MAX_KINDS = 1000  # different alerts that are stored; the oldest are dropped
LEVELS = {severity: logging.getLevelNamesMapping()[severity.name] for severity in AlertSeverity}


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


def format_evidence(evidence: Mapping[str, float | str]) -> str:
    """The values as text: `l2 12.3, nan 4`."""
    return ", ".join(f"{name} {number_or_text(value)}" for name, value in evidence.items())


class AlertDispatcher:
    """Counts alerts and delivers them. An exception in a receiver is logged once and never reaches the training."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str, str], Alert] = OrderedDict()
        self._undelivered: set[tuple[str, str, str]] = set()  # raised again since the last delivery
        self.webhooks: list[Webhook] = []  # the receivers that are web addresses
        self._receivers: list[tuple[Callable[[Alert], object], AlertSeverity]] = []  # with the least severity that they receive
        self._failed: set[int] = set()  # indices of receivers with a logged failure
        self._lock = threading.Lock()

    @property
    def history(self) -> list[Alert]:
        """Every alert once, with its count, oldest first."""
        with self._lock:
            return list(self._known.values())

    def clear(self) -> None:
        """Drops all alerts; the receivers stay."""
        with self._lock:
            self._known.clear()
            self._undelivered.clear()

    def send_to(self, target: Callable[[Alert], object] | str, *, at_least: AlertSeverity, timeout_s: float = TIMEOUT_S) -> None:
        """Adds a receiver: a function that takes an `Alert`, or a web address that receives it as JSON."""
        if isinstance(target, str):
            webhook = Webhook(target, timeout_s=timeout_s)
            self.webhooks.append(webhook)
            target = lambda alert: webhook.send(asdict(alert) | {"text": str(alert)})  # noqa: E731
        elif not callable(target):
            raise SondeError(f"alerts go to a function or to a web address, not to {type(target).__name__}.")
        self._receivers.append((target, at_least))

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
            is_delivered = alert.count == 10 ** (len(str(alert.count)) - 1)
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
        for index, (send, at_least) in enumerate(self._receivers):
            try:
                if alert.severity.rank >= at_least.rank:
                    send(alert)
            except Exception as error:
                if index not in self._failed:
                    self._failed.add(index)
                    _log.warning("sonde: a receiver of alerts failed (%s: %s). Training continues.", type(error).__name__, error)
