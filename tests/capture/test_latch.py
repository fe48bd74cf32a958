"""The lock of the writer, of which the native kernel has its own kind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

import sonde
from sonde.capture import beat
from sonde.capture.beat import Latch

pytestmark = [pytest.mark.torch, pytest.mark.skipif(beat.Beat is None, reason="the native kernel was not built")]


def in_a_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_it_is_reentrant_and_free_when_left_as_often_as_it_was_taken():
    latch, found = Latch(), []
    with latch:
        assert latch.acquire()
        latch.release()
        in_a_thread(lambda: found.append(latch.acquire(timeout=0.01))).join()
    in_a_thread(lambda: found.append(latch.acquire(timeout=0.01))).join()
    assert found == [False, True]


def test_whoever_does_not_hold_it_cannot_leave_it():
    latch = Latch()
    with pytest.raises(RuntimeError, match="does not hold the latch"):
        latch.release()
    in_a_thread(latch.acquire).join()
    with pytest.raises(RuntimeError, match="does not hold the latch"):
        latch.release()


def test_an_error_inside_leaves_it():
    latch = Latch()
    with pytest.raises(KeyError), latch:
        raise KeyError
    assert latch.acquire(timeout=0)


def test_only_one_of_many_threads_is_inside():
    latch, total = Latch(), [0]

    def work() -> None:
        for _ in range(300):
            with latch:
                before = total[0]
                time.sleep(0)
                total[0] = before + 1

    for thread in [in_a_thread(work) for _ in range(4)]:
        thread.join()
    assert total == [1200]


def test_ctrl_c_ends_the_waiting():
    latch, held, done = Latch(), threading.Event(), threading.Event()

    def hold() -> None:
        with latch:
            held.set()
            time.sleep(0.2)  # by then the other one waits
            os.kill(os.getpid(), signal.SIGINT)
            done.wait(20)

    thread = in_a_thread(hold)
    held.wait()
    try:
        with pytest.raises(KeyboardInterrupt):
            latch.acquire()
    finally:
        done.set()
        thread.join()
    assert latch.acquire(timeout=1)


def test_while_another_thread_holds_it_a_step_waits_and_nothing_is_lost(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    over = threading.Event()
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=10_000, strict=True) as session:
        writer = session._journal.writer

        def disturb() -> None:
            while not over.is_set():
                with writer._lock:
                    time.sleep(0.001)
                session.log(noise=1.0)
                time.sleep(0.001)

        thread = in_a_thread(disturb)
        for _ in range(300):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().mean().backward()
            optimizer.step()
        over.set()
        thread.join()
    run = sonde.Run(tmp_path / "run")
    assert not run.damage
    assert list(run.scalar("optimizer_steps")[0]) == list(range(300))
