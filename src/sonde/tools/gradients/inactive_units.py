"""Units (output features or channels) whose gradient is exactly zero in every recent step, as behind a ReLU that never opens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WINDOW = 10  # steps that are counted together; the last complete window and the current one are judged
ENOUGH_STEPS = 3  # fewer do not show that a unit is inactive
_MEASURED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
USUALLY_ACTIVE = 0.5  # share of the steps in which the other units have a gradient: rows of an embedding have one whenever they are used


@dataclass(frozen=True, slots=True)
class InactiveUnits:
    """The units of one weight that had no gradient in the last `num_steps` steps."""

    units: tuple[int, ...]
    num_units: int
    num_steps: int

    @property
    def share(self) -> float:
        return len(self.units) / self.num_units


class UnitActivity:
    """Counts in how many steps each row of a weight's gradient was not zero. Once all rows were active, a window is not measured further,
    so that a healthy weight costs one pass in ten steps."""

    def __init__(self) -> None:
        self._window = _Window()
        self._last = _Window()

    @torch.no_grad()
    def update(self, gradient: Tensor) -> None:
        """Measures the gradient of one step; one without rows (a bias, a sparse or distributed gradient) is ignored."""
        if type(gradient) is not Tensor or gradient.layout is not torch.strided or gradient.is_meta or gradient.dtype not in _MEASURED:
            return
        if gradient.ndim < 2 or not gradient.numel():
            return
        if self._window.num_steps == WINDOW:
            self._last, self._window = self._window, _Window()
        self._window.update(gradient)

    def inactive(self) -> InactiveUnits | None:
        """The inactive units; None if there are none, or too few steps."""
        windows = [window for window in (self._last, self._window) if window.counts is not None]
        num_steps = sum(window.num_steps for window in windows)
        if num_steps < ENOUGH_STEPS or any(window.all_active for window in windows):
            return None
        shapes = {tuple(window.counts.shape) for window in windows if window.counts is not None}
        if len(shapes) > 1:  # the layer was replaced by another
            return None
        counts = torch.stack([window.counts for window in windows if window.counts is not None]).sum(0).cpu()
        units = torch.nonzero(counts == 0).flatten().tolist()
        active = counts[counts > 0]
        if not units or not len(active) or float(active.double().mean()) < USUALLY_ACTIVE * num_steps:
            return None  # none inactive, all inactive (a dead layer), or rows that are used now and then
        return InactiveUnits(tuple(units), len(counts), num_steps)


class _Window:
    """The counts of up to WINDOW steps."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.counts: Tensor | None = None  # per row: steps with a gradient other than zero
        self.all_active = False

    def update(self, gradient: Tensor) -> None:
        self.num_steps += 1
        if self.all_active:
            return
        active = (gradient.detach().reshape(len(gradient), -1) != 0).any(1)  # a NaN is not zero
        if self.counts is None or self.counts.shape != active.shape:
            self.counts = torch.zeros_like(active, dtype=torch.int32)
        self.counts += active
        self.all_active = bool((self.counts > 0).all())
