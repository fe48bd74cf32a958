"""An inquest: for a few steps it is followed what stays alive, and then said who holds it. It costs those steps some milliseconds each.

Following tensors is another room's work and is reached by the public door, loaded only now: a healthy training never pays for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter_ns
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

import sonde
from sonde.capture.error_isolation import Faults
from sonde.capture.recorder import Journal
from sonde.capture.standins import Desk

NUM_STEPS = 14  # that are followed: a few more than a trend needs
MAX_LEAKS = 3  # told of


class LeakInvestigation:
    """`closed` is told whether something was found."""

    def __init__(self, journal: Journal, desk: Desk, faults: Faults, closed: Callable[[bool], None], step: int) -> None:
        self._journal, self._desk, self._faults, self._closed, self._step = journal, desk, faults, closed, step
        self._num_left = NUM_STEPS
        self._own_ns = 0
        self._watch = sonde.LeakDetector()
        self._handle: Any = register_optimizer_step_post_hook(self._stepped)

    def close(self, *, found: bool = False) -> None:
        """Takes its hook off; without an answer where it was not over."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
            self._closed(found)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        began = perf_counter_ns()
        try:
            self._watch.step()
            self._num_left -= 1
            if self._num_left <= 0:
                self.close(found=self._answer(began))
        except Exception as error:
            self.close()
            self._faults.caught("inquest", "", error)
        finally:
            taken = perf_counter_ns() - began
            self._own_ns += taken
            self._desk.own_ns += taken

    def _answer(self, began: int) -> bool:
        # The watch counts from where it began.
        since = self._step + 1
        found = [replace(leak, first_step=leak.first_step + since, last_step=leak.last_step + since) for leak in self._watch.leaks()]
        leaks = [
            {
                "holder": leak.holder, "cause": leak.cause, "fix": leak.fix, "num_bytes": leak.num_bytes, "num_tensors": leak.num_tensors,
                "num_nodes": leak.num_nodes, "per_step_bytes": leak.per_step_bytes,
            }
            for leak in found[:MAX_LEAKS]
        ]  # fmt: skip
        look_ms = round((self._own_ns + perf_counter_ns() - began) / 1e6, 3)
        self._journal.event("leaks", self._step, leaks=leaks, num_steps=NUM_STEPS, look_ms=look_ms)
        return bool(leaks)
