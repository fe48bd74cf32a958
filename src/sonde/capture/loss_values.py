"""The losses of a step: read where they are handed to backward, averaged over the step, unscaled where a GradScaler scaled them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from sonde.capture.recorder import Journal
from sonde.statistics import reductions, torch_ops
from sonde.statistics.deferred_reads import Far
from sonde.statistics.tensor_utils import read_scalar


class Losses:
    __slots__ = ("__dict__", "__weakref__", "_away", "_scale", "_scale_away", "_sums", "divided_by", "last")  # see beat.py

    def __init__(self, journal: Journal, far: Far) -> None:
        self._journal, self._far = journal, far
        self._sums: dict[str, tuple[float, int]] = {}
        self._away: dict[str, list[torch.Tensor]] = {}  # losses on a device, by series
        self.last = math.nan  # that was taken; NaN where it is on a device
        self.backoff = math.nan  # what a GradScaler multiplies its scale with after a skipped step
        self.divided_by: Callable[[], float] | None = None  # what a framework divides each loss by before backward
        self._scale = math.nan
        self._scale_away: torch.Tensor | None = None

    def scaled(self, scaler: Any) -> None:
        scale = scaler._scale if scaler.is_enabled() else None
        number = None if scale is None else read_scalar(scale)
        self._scale = math.nan if number is None else number
        self._scale_away = scale.detach().clone() if scale is not None and number is None else None
        self._journal.scalars["loss_scale"] = self._scale
        self.backoff = scaler._backoff_factor if scaler.is_enabled() else math.nan

    @property
    def scale(self) -> float:
        """Of a GradScaler in this step; NaN without one, and where it is on a device."""
        return self._scale

    @property
    def is_scaled(self) -> bool:
        return not math.isnan(self._scale) or self._scale_away is not None

    def take(self, series: str, loss: torch.Tensor) -> bool:
        """Answers whether the loss is a finite number, as far as can be told without waiting for a device."""
        self.last = math.nan
        value = reductions.read_element(loss)
        if value is None:
            value = read_scalar(loss)
        if value is None:
            if torch_ops.unsupported_reason(loss) is None:  # a meta or fake tensor holds no number
                self._away.setdefault(series, []).append(_one(loss))
            return True
        if not math.isnan(self._scale):
            value /= self._scale
        if self.divided_by is not None:
            value *= self.divided_by()
        self.last = value
        total, num = self._sums.get(series, (0.0, 0))
        self._sums[series] = (total + value, num + 1)
        return math.isfinite(value)

    def log_later(self, name: str, value: torch.Tensor, step: int) -> None:
        """A number of the user's that lives on a device."""
        if torch_ops.unsupported_reason(value) is None:
            self._far.later(_one(value), partial(self._logged, step, name))

    def write(self, step: int) -> None:
        for series, (total, num) in self._sums.items():
            self._journal.scalars[series] = total / num
        for series, losses in self._away.items():
            scale = self._scale_away if self._scale_away is not None else torch.ones_like(losses[0])
            mean = torch.stack(losses).mean().reshape(1) * (self.divided_by() if self.divided_by is not None else 1.0)
            self._far.later(torch.cat([mean, _one(scale).to(mean.device)]), partial(self._answer, step, series))

    def clear(self) -> None:
        self._sums.clear()
        self._away.clear()
        self._scale, self._scale_away = math.nan, None

    def _answer(self, step: int, series: str, numbers: Sequence[float] | Exception) -> None:
        if isinstance(numbers, Exception):
            return  # the step's loss stays unknown
        loss = numbers[0] / numbers[1]
        self._journal.scalars_of(step)[series] = loss
        if not math.isfinite(loss):
            self._journal.event("nonfinite", step, what="loss", where=series, num_elements=1)

    def _logged(self, step: int, name: str, numbers: Sequence[float] | Exception) -> None:
        if not isinstance(numbers, Exception):
            self._journal.log(step, {name: numbers[0]})


def _one(value: torch.Tensor) -> torch.Tensor:
    return value.detach().reshape(-1)[:1].to(torch.float32)
