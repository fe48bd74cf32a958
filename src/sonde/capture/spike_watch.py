"""The loss and the gradient norm of every step, held against those of the steps before: scalars only, no tensor is read for it."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, inf, log

from sonde.spike_detection import Leap, Losses, Norms

MAX_OPTIMIZERS = 16  # with norms of their own: some programs make a new optimizer for every step, and those share the last


class Spikes:
    __slots__ = ("__dict__", "__weakref__", "_losses", "_norms")  # see beat.py

    def __init__(self, on_spike: Callable[[str, str, Leap], None]) -> None:
        self._on_spike = on_spike  # ("loss" or "gradient", the series of the loss, how far): before anything has used it
        self._losses: dict[str, Losses] = {}  # by series: the switchboard knows nine at most
        self._norms: dict[int, Norms] = {}

    def begin_anew(self) -> None:
        """A new optimizer: another model or another task, whose numbers are not those of the one before."""
        self._losses.clear()
        self._norms.clear()

    def loss(self, series: str, value: float) -> None:
        """A loss on its way to backward; NaN where it is on a device, and nobody waits for it."""
        if not -inf < value < inf:
            return
        recent = self._losses.get(series)
        if recent is None:
            recent = self._losses[series] = Losses()
        leap = recent.see(value)
        if leap is not None:
            self._on_spike("loss", series, leap)

    def gradient(self, optimizer: int, sum_of_squares: float) -> None:
        """The gradients that an optimizer is about to use."""
        if not 0 < sum_of_squares < inf:
            return
        place = min(optimizer, MAX_OPTIMIZERS - 1)
        recent = self._norms.get(place)
        if recent is None:
            recent = self._norms[place] = Norms()
        leap = recent.see(0.5 * log(sum_of_squares))
        if leap is not None:
            self._on_spike("gradient", "grad_norm", Leap(*map(exp, leap)))
