"""The losses of a step: read where they are handed to backward, averaged over the step, unscaled where a GradScaler scaled them."""

from __future__ import annotations

import math
from typing import Any

import torch

from sonde.capture import kernel
from sonde.capture.journal import Journal
from sonde.capture.tensors import read_number


class Losses:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._sums: dict[str, tuple[float, int]] = {}
        self._pending: list[tuple[str, torch.Tensor]] = []  # numbers on a device, to be read once, when the step ends
        self._scale = math.nan

    def scaled(self, scaler: Any) -> None:
        scale = read_number(scaler._scale) if scaler.is_enabled() and scaler._scale is not None else None
        self._scale = math.nan if scale is None else scale
        self._journal.set("loss_scale", self._scale)

    def take(self, series: str, loss: torch.Tensor) -> bool:
        """Answers whether the loss is a finite number, as far as can be told without waiting for a device."""
        value = kernel.number(loss)
        if value is None:
            value = read_number(loss)
        if value is None:
            self.later(series, loss)
            return True
        if not math.isnan(self._scale):
            value /= self._scale
        total, num = self._sums.get(series, (0.0, 0))
        self._sums[series] = (total + value, num + 1)
        return math.isfinite(value)

    def later(self, name: str, value: torch.Tensor) -> None:
        """A number that lives on a device: it is brought over with the others when the step ends."""
        if kernel.supported(value) is None:  # a meta or fake tensor holds no number
            self._pending.append((name, value.detach().reshape(-1)[0].to(torch.float32)))

    def write(self, step: int) -> None:
        if self._pending:
            self._bring_over(step)
        for series, (total, num) in self._sums.items():
            self._journal.set(series, total / num)

    def clear(self) -> None:
        self._sums.clear()
        self._scale = math.nan

    def _bring_over(self, step: int) -> None:
        """One transfer for all of the step. (Not run in our tests, which have no device but the CPU.)"""
        pending, self._pending = self._pending, []  # first, so that a failed transfer is not tried again with every step
        names = [name for name, _ in pending]
        values = torch.stack([tensor for _, tensor in pending]).cpu().tolist()
        for name, value in zip(names, values):
            if name.partition(":")[0] == "loss":
                self._journal.set(name, value / self._scale if not math.isnan(self._scale) else value)
                if not math.isfinite(value):
                    self._journal.event("nonfinite", step, what="loss", where=name, num_elements=1)
            else:
                self._journal.log(step, {name: value})
