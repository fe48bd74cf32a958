"""Sends alerts to a web address from a daemon thread, with a bounded queue and a timeout, so that training never waits."""

from __future__ import annotations

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
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from sonde.errors import SondeError
from sonde.report import strict

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
        parts = _split(url)
        if parts is None:
            raise SondeError(f"a webhook needs an address that begins with http:// or https:// and names a host, not {url!r}.")
        if not timeout_s > 0:
            raise SondeError(f"timeout_s is a number of seconds, more than 0, not {timeout_s!r}.")
        self._url, self._timeout_s = url, timeout_s
        self.host = parts  # safe to log: the path of an address often contains a secret
        self.num_sent = self.num_failed = self.num_dropped = 0
        self.last_error = ""
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._waiting: queue.Queue[bytes] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._is_registered = self._gave_up = False

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
            if not self._is_registered:
                self._is_registered = True
                atexit.register(_wait_at_exit, weakref.ref(self))

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
            request = urllib.request.Request(
                self._url, body, {"Content-Type": "application/json", "User-Agent": "sonde"}, method="POST"
            )
            with opener.open(request, timeout=self._timeout_s):
                self.num_sent += 1
        except (OSError, HTTPException, ValueError) as error:  # URLError and timeouts are OSErrors
            self.num_failed += 1
            code = error.code if isinstance(error, urllib.error.HTTPError) else None
            self.last_error = f"answered {code}" if code else f"{type(error).__name__}: {getattr(error, 'reason', error)}"
            if self.num_failed == 1:
                _log.warning(
                    "sonde: an alert could not be sent to %s (%s). Training continues; further failures are only counted.",
                    self.host, self.last_error,
                )  # fmt: skip


def _split(url: object) -> str | None:
    """Scheme, host and port of a web address; None if it is not one."""
    if not isinstance(url, str) or not url.isprintable() or " " in url:
        return None
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            return None
        return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
    except ValueError:
        return None


_exit_times: list[float] = []  # the first is the start of the exit: all webhooks share one waiting time


def _wait_at_exit(ref: weakref.ref[Webhook]) -> None:
    webhook = ref()
    if webhook is not None:
        _exit_times.append(time.monotonic())
        webhook.wait(max(0.0, _exit_times[0] + LAST_WAIT_S - time.monotonic()))
