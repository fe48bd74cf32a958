"""What is odd in a step (a bad number, a spike, a skipped update) goes from here to whoever looks back at it.

That is the moment before anything uses the number. It costs the odd step alone, and none of it is heard by the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch

from sonde.capture.replay_buffer import ForwardCall
from sonde.spike_detection import Leap

if TYPE_CHECKING:
    from sonde.capture.step_tracker import Loop


class Oddities:
    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def bad_number(self, what: str, where: str, tensor: torch.Tensor) -> None:
        """The loss or a gradient is not finite."""
        loop = self._loop
        with self._unheard():
            loop.kept.tell(what, where, tensor, step=loop.clock.number, scaled=loop._losses.is_scaled)

    def bad_evaluation(self, call: ForwardCall, step: int, only_inf: bool) -> bool:
        with self._unheard():
            return self._loop.kept.on_bad_evaluation(call, step, only_inf)

    def spike(self, what: str, where: str, leap: Leap) -> None:
        """The loss or a gradient norm is far above the usual."""
        loop = self._loop
        with self._unheard():
            loop.kept.on_spike(what, where, leap, loop.clock.number)

    def skip(self, parameters: list[torch.Tensor]) -> None:
        """A GradScaler holds back the optimizer of these parameters."""
        loop = self._loop
        with self._unheard():
            loop.kept.on_skip(parameters, loop.clock.number, loop._losses.scale, loop._losses.backoff)

    @contextmanager
    def _unheard(self) -> Iterator[None]:
        loop = self._loop
        loop.xray.give_up()  # what is run again now is not the step's own time
        began, loop.deaf = perf_counter_ns(), True
        try:
            yield
        finally:
            loop.deaf = False
            loop._phases.leave_out(perf_counter_ns() - began)
