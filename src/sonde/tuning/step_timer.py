"""Counts the steps of a trial, times the settled ones, keeps their losses. It hears the loop through the switchboard, as a session does."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from sonde.capture.patches import TrainingCallbacks
from sonde.capture.step_boundaries import StepBoundaries
from sonde.tuning.messages import FEWEST_STEPS

PATIENCE = 5  # times the wanted seconds: then a slow training is measured by the fewest steps


class Stopwatch(TrainingCallbacks):
    """After `warmup` steps it measures `num_steps` of them; where that is 0, as many as take `seconds`.

    Most moments leave it cold: it inherits them, and they do nothing.
    """

    def __init__(self, *, warmup: int, num_steps: int, seconds: float) -> None:
        self._warmup, self._wanted, self._wanted_s = warmup, num_steps, seconds
        self._clock = StepBoundaries()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._scaler_stepped = False
        self._losses: list[torch.Tensor] = []  # of the step under way
        self._by_step: list[list[torch.Tensor]] = []
        self._touched_s = 0.0  # first call of a training
        self._began_s = 0.0  # first measured step
        self._ended_s = 0.0  # last one
        self.total_steps = 0
        self.on_settled: Callable[[], None] = lambda: None
        self.on_step: Callable[[], None] = lambda: None
        self.on_enough: Callable[[], None] = lambda: None

    @property
    def num_steps(self) -> int:
        return max(self.total_steps - self._warmup, 0)

    @property
    def seconds(self) -> float:
        return self._ended_s - self._began_s if self.num_steps else 0.0

    @property
    def warmup_s(self) -> float:
        return self._began_s - self._touched_s if self._began_s else 0.0

    def losses(self) -> tuple[float, ...]:
        """One number per step: what was handed to backward in it, summed. Steps without a loss of one number have NaN."""
        return tuple(sum(float(loss) for loss in losses) if losses else float("nan") for losses in self._by_step)

    # -- what is heard -----------------------------------------------------------------------------

    def on_optimizer_created(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.add(optimizer)
        self._clock.num_optimizers = len(self._optimizers)

    def on_batch_start(self) -> None:
        self._touch()
        self._after(self._clock.on_batch_start())

    def on_zero_grad(self, target: Any) -> None:
        self._touch()
        self._after(self._clock.on_zero_grad(id(target)))

    def on_backward_start(self, tensors: Any) -> None:
        self._touch()
        self._after(self._clock.on_backward_start(has_cleared=False, has_moved=False))
        if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
            self._losses.append(tensors.detach().clone())

    def on_optimizer_step_start(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        self._touch()
        self.on_optimizer_created(optimizer)
        self._after(self._clock.on_optimizer_step_start(id(optimizer)))

    def on_optimizer_step_end(self, optimizer: torch.optim.Optimizer) -> None:
        self._scaler_stepped = True
        self._after(self._clock.on_optimizer_step_end(id(optimizer)))

    def on_scaler_step_start(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        self._scaler_stepped = False

    def on_scaler_step_end(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        if not self._scaler_stepped:  # the scaler found an overflow: that, too, is a step of the loop
            self.on_optimizer_step_start(optimizer, False)
            self.on_optimizer_step_end(optimizer)

    # -- what follows from it ----------------------------------------------------------------------

    def _touch(self) -> None:
        if not self._touched_s:
            self._touched_s = perf_counter()

    def _after(self, ended: bool) -> None:
        if not ended:
            return
        self._clock.end_step()
        self._by_step.append(self._losses)
        self._losses = []
        self.total_steps += 1
        settled, enough = self.total_steps == self._warmup, False
        if settled or self.total_steps == self._warmup + self._wanted:
            self._wait_for_device()
        now = perf_counter()
        if settled:
            self._began_s = now
        elif self.num_steps:
            self._ended_s = now
            enough = self._is_enough()
        self.on_step()
        if settled:
            self.on_settled()
        if enough:
            self.on_enough()

    def _is_enough(self) -> bool:
        if self._wanted:
            return self.num_steps >= self._wanted
        least = FEWEST_STEPS if self.seconds > PATIENCE * self._wanted_s else 2 * FEWEST_STEPS
        return self.num_steps >= least and self.seconds >= self._wanted_s

    def _wait_for_device(self) -> None:
        """Work that is only queued is not done."""
        if any(p.device.type != "cpu" for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]):
            torch.accelerator.synchronize()
