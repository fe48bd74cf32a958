"""Alerts are delivered to the log, to functions and to real web servers (some of which hang), and repeated ones are counted."""

from __future__ import annotations

import json
import logging
import queue
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("torch")

from sonde import AlertSeverity, SondeError
from sonde.events import Severity
from sonde.tools.hooks import alerts as webhook_module
from sonde.tools.hooks.alerts import LEVELS, MAX_KINDS, MAX_WAITING, Alert, AlertDispatcher, Webhook
from training_harness import python

pytestmark = pytest.mark.torch

PATIENCE_S = 30.0  # for one of our threads; not reached in a passing test


def alert(message: str = "loss is nan", *, step: int = 3, where: str = "head", **evidence: float) -> Alert:
    return Alert(AlertSeverity.ERROR, message, "mine", where, step, evidence)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "sonde"]


# -- log and functions -----------------------------------------------------------------------------


def test_alerts_and_findings_share_one_scale_and_each_severity_has_a_log_level() -> None:
    assert AlertSeverity is Severity
    assert [LEVELS[severity] for severity in AlertSeverity] == [logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL]


@pytest.mark.parametrize("severity", AlertSeverity)
def test_an_alert_is_logged_with_its_level_place_and_numbers(severity: AlertSeverity, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sonde")
    AlertDispatcher().emit(Alert(severity, "too large", "mine", "encoder.0", 7, {"l2": 12.345, "nan": float("nan")}))
    (record,) = caplog.records
    assert record.levelno == LEVELS[severity]
    assert record.getMessage() == "sonde: mine: too large at encoder.0 in step 7 (l2 12.3, nan NaN)"


def test_control_characters_are_escaped_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    AlertDispatcher().emit(alert("\x1b[31mred", where="a\nb"))
    assert messages(caplog) == ["sonde: mine: \\x1b[31mred at a\\x0ab in step 3"]


def test_a_repeated_alert_is_counted_and_logged_again_at_ten_and_at_a_hundred(caplog: pytest.LogCaptureFixture) -> None:
    alerts = AlertDispatcher()
    heard: list[int] = []
    alerts.send_to(lambda each: heard.append(each.count), at_least=AlertSeverity.INFO)
    for step in range(250):
        alerts.emit(alert(step=step))
    assert heard == [1, 10, 100]
    assert "in step 99, 100 times since step 0" in messages(caplog)[-1]
    assert [(each.count, each.step, each.last_step) for each in alerts.history] == [(250, 0, 249)]


def test_alerts_that_were_only_counted_are_delivered_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    alerts = AlertDispatcher()
    for step in range(4):
        alerts.emit(alert(step=step))
    alerts.emit(alert("another"))
    alerts.close()
    alerts.close()
    assert [text.partition("mine: ")[2] for text in messages(caplog)] == [
        "loss is nan at head in step 0", "another at head in step 3", "loss is nan at head in step 3, 4 times since step 0",
    ]  # fmt: skip


def test_alerts_of_another_layer_or_message_are_separate() -> None:
    alerts = AlertDispatcher()
    for each in (alert(), alert(where="tail"), alert("other"), alert()):
        alerts.emit(each)
    assert [(each.message, each.where, each.count) for each in alerts.history] == [
        ("loss is nan", "head", 2), ("loss is nan", "tail", 1), ("other", "head", 1),
    ]  # fmt: skip


def test_the_number_of_stored_alerts_is_bounded() -> None:
    alerts = AlertDispatcher()
    for step in range(MAX_KINDS + 10):
        alerts.emit(alert(f"number {step}"))
        alerts.emit(alert(f"number {step}"))
    assert len(alerts.history) == MAX_KINDS
    assert alerts.history[0].message == "number 10"
    assert len(alerts._undelivered) == MAX_KINDS


def test_a_receiver_gets_alerts_from_its_severity_on() -> None:
    alerts = AlertDispatcher()
    heard: list[str] = []
    alerts.send_to(lambda each: heard.append(each.message), at_least=AlertSeverity.ERROR)
    for severity in AlertSeverity:
        alerts.emit(Alert(severity, severity.value, "mine", "", 0))
    assert heard == ["error", "critical"]


def test_a_receiver_that_fails_is_logged_once_and_does_not_block_others(caplog: pytest.LogCaptureFixture) -> None:
    alerts = AlertDispatcher()
    heard: list[str] = []
    alerts.send_to(lambda each: {}["missing"], at_least=AlertSeverity.INFO)
    alerts.send_to(lambda each: heard.append(each.message), at_least=AlertSeverity.INFO)
    alerts.emit(alert("one"))
    alerts.emit(alert("two"))
    assert heard == ["one", "two"]
    assert [text for text in messages(caplog) if "receiver" in text] == [
        "sonde: a receiver of alerts failed (KeyError: 'missing'). Training continues."
    ]


def test_alerts_from_many_threads_are_counted_exactly() -> None:
    alerts = AlertDispatcher()
    threads = [threading.Thread(target=lambda: [alerts.emit(alert()) for _ in range(200)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.count for each in alerts.history] == [1600]


# -- web addresses ---------------------------------------------------------------------------------


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/alerts?token=secret"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def handler(got: queue.Queue[Any], status: int = 200, location: str = "") -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.put((self.path, self.headers["Content-Type"], body))
            self.send_response(status)
            if location:
                self.send_header("Location", location)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def silent_host() -> Iterator[str]:
    """Accepts connections and never responds."""
    listening = socket.create_server(("127.0.0.1", 0))
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    listening.close()


def test_a_webhook_gets_the_alert_as_strict_json() -> None:
    got: queue.Queue[Any] = queue.Queue()
    with serving(handler(got)) as url:
        alerts = AlertDispatcher()
        alerts.send_to(url, at_least=AlertSeverity.WARNING)
        alerts.emit(alert(l2=float("inf"), nan=3.0))
        path, kind, body = got.get(timeout=PATIENCE_S)
        alerts.close()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    document = json.loads(body, parse_constant=refuse)
    assert (path, kind) == ("/alerts?token=secret", "application/json")
    assert document["severity"] == "error"
    assert document["evidence"] == {"l2": "Infinity", "nan": 3.0}
    assert document["text"] == "loss is nan at head in step 3 (l2 Infinity, nan 3)"
    assert (alerts.webhooks[0].num_sent, alerts.webhooks[0].num_failed) == (1, 0)


def test_a_refusal_is_counted_and_logged_once_without_the_secret_in_the_address(caplog: pytest.LogCaptureFixture) -> None:
    got: queue.Queue[Any] = queue.Queue()
    with serving(handler(got, status=500)) as url:
        webhook = Webhook(url)
        for number in range(3):
            webhook.send({"number": number})
        assert webhook.wait(PATIENCE_S)
    assert (webhook.num_sent, webhook.num_failed, webhook.last_error) == (0, 3, "answered 500")
    (text,) = messages(caplog)
    assert "could not be sent to http://127.0.0.1:" in text
    assert "secret" not in text


def test_a_redirect_is_not_followed() -> None:
    got: queue.Queue[Any] = queue.Queue()
    elsewhere: queue.Queue[Any] = queue.Queue()
    with serving(handler(elsewhere)) as other, serving(handler(got, status=302, location=other)) as url:
        webhook = Webhook(url)
        webhook.send({"a": 1})
        assert webhook.wait(PATIENCE_S)
    assert (webhook.num_failed, webhook.last_error) == (1, "answered 302")
    assert elsewhere.empty()


def test_an_unreachable_host_is_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    webhook = Webhook(f"http://127.0.0.1:{port}/")
    webhook.send({"a": 1})
    assert webhook.wait(PATIENCE_S)
    assert webhook.num_failed == 1
    assert "refused" in webhook.last_error


def test_a_host_that_hangs_does_not_block_send_and_dropped_alerts_are_counted(silent_host: str) -> None:
    webhook = Webhook(silent_host, timeout_s=PATIENCE_S)
    num = MAX_WAITING + 50
    for number in range(num):  # returns at once: the thread is still waiting for the first answer
        webhook.send({"number": number})
    assert webhook.num_sent == webhook.num_failed == 0
    assert num - MAX_WAITING - 1 <= webhook.num_dropped <= num - MAX_WAITING
    assert webhook.wait(0.01) is False


def test_a_request_to_a_host_that_hangs_ends_after_the_timeout(silent_host: str) -> None:
    webhook = Webhook(silent_host, timeout_s=0.05)
    webhook.send({"a": 1})
    assert webhook.wait(PATIENCE_S)
    assert webhook.num_failed == 1
    assert "timed out" in webhook.last_error


def test_the_thread_ends_when_idle_and_the_next_alert_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_module, "IDLE_S", 0.01)
    got: queue.Queue[Any] = queue.Queue()
    with serving(handler(got)) as url:
        webhook = Webhook(url)
        for number in range(3):
            webhook.send({"number": number})
            assert json.loads(got.get(timeout=PATIENCE_S)[2]) == {"number": number}
            thread = webhook._thread
            if thread is not None:
                thread.join(PATIENCE_S)
                assert not thread.is_alive()
    assert webhook.num_sent == 3


def test_the_last_alert_of_a_program_is_still_sent(tmp_path: Any) -> None:
    """The alert about the end of a training is raised right before the program ends."""
    got: queue.Queue[Any] = queue.Queue()
    with serving(handler(got)) as url:
        code = """
            import sys
            from sonde.tools.hooks.alerts import Webhook
            Webhook(sys.argv[1]).send({"last": "words"})
            webhook = Webhook(sys.argv[1])
            webhook.send({"last": "words"})
            raise SystemExit(3)
        """
        result = python(code, tmp_path, url, no_proxy="*")
        assert (result.returncode, result.stderr) == (3, "")
        assert json.loads(got.get(timeout=PATIENCE_S)[2]) == {"last": "words"}


def test_r46_all_hosts_that_hang_share_one_waiting_time_at_exit(
    silent_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_module, "LAST_WAIT_S", 0.2)
    monkeypatch.setattr(webhook_module, "_exit_times", [])
    waits: list[float] = []
    really = Webhook.wait

    def noted(self: Webhook, seconds: float) -> bool:
        waits.append(seconds)
        return really(self, seconds)

    monkeypatch.setattr(Webhook, "wait", noted)
    webhooks = [Webhook(silent_host, timeout_s=PATIENCE_S) for _ in range(5)]
    for webhook in webhooks:
        webhook.send({"last": "words"})
        webhook_module._wait_at_exit(weakref.ref(webhook))
    assert waits[0] <= 0.2
    assert sum(waits) < 0.25  # the first one used all of the waiting time


@pytest.mark.parametrize(
    "url", ["", "ftp://host/x", "file:///etc/passwd", "http://", "https:///path", "host/path", "http://a b/", "http://h:99999999/", 7, "http://[bad"]
)
def test_only_web_addresses_are_accepted(url: Any) -> None:
    with pytest.raises(SondeError):
        AlertDispatcher().send_to(url, at_least=AlertSeverity.INFO)


def test_a_timeout_of_zero_is_refused() -> None:
    with pytest.raises(SondeError, match="timeout_s is a number of seconds"):
        Webhook("http://localhost/", timeout_s=0)
