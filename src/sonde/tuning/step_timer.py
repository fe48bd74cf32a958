"""Counts the steps of a trial, times those after the warm-up and stores their losses. It uses the same patches as a session."""

import weakref
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from sonde.capture.detect_step_end import StepBoundaries
from sonde.capture.training_callbacks import TrainingCallbacks
from sonde.tuning.trial_messages import MIN_STEPS

PATIENCE = 5  # times the requested seconds: after that, MIN_STEPS steps are enough


class StepTimer(TrainingCallbacks):
    """Measures `num_steps` steps after `warmup` others; with `num_steps` 0, as many as take `seconds`."""

    def __init__(self, *, warmup: int, num_steps: int, seconds: float) -> None:
        self._warmup, self._target, self._target_s = warmup, num_steps, seconds
        self._boundaries = StepBoundaries()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._scaler_stepped = False
        self._losses: list[torch.Tensor] = []  # of the current step
        self._by_step: list[list[torch.Tensor]] = []
        self._started_s = 0.0  # first call of the training loop
        self._began_s = 0.0  # first measured step
        self._ended_s = 0.0  # last one
        self.total_steps = 0
        self.on_warmup_end: Callable[[], None] = lambda: None
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
        return self._began_s - self._started_s if self._began_s else 0.0

    def losses(self) -> tuple[float, ...]:
        """Per step the sum of the losses that `backward` was called on; NaN for a step without a scalar loss."""
        return tuple(sum(float(loss) for loss in losses) if losses else float("nan") for losses in self._by_step)

    def on_optimizer_created(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.add(optimizer)
        self._boundaries.num_optimizers = len(self._optimizers)

    def on_batch_start(self) -> None:
        self._note_start()
        self._end_step_if(self._boundaries.on_batch_start())

    def on_zero_grad(self, target: Any) -> None:
        self._note_start()
        self._end_step_if(self._boundaries.on_zero_grad(id(target)))

    def on_backward_start(self, tensors: Any) -> None:
        self._note_start()
        self._end_step_if(self._boundaries.on_backward_start(has_cleared=False, has_moved=False))
        if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
            self._losses.append(tensors.detach().clone())

    def on_optimizer_step_start(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        self._note_start()
        self.on_optimizer_created(optimizer)
        self._end_step_if(self._boundaries.on_optimizer_step_start(id(optimizer)))

    def on_optimizer_step_end(self, optimizer: torch.optim.Optimizer) -> None:
        self._scaler_stepped = True
        self._end_step_if(self._boundaries.on_optimizer_step_end(id(optimizer)))

    def on_scaler_step_start(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        self._scaler_stepped = False

    def on_scaler_step_end(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        if not self._scaler_stepped:  # the scaler found an overflow: still a step of the loop
            self.on_optimizer_step_start(optimizer, False)
            self.on_optimizer_step_end(optimizer)

    def _note_start(self) -> None:
        self._started_s = self._started_s or perf_counter()

    def _end_step_if(self, ended: bool) -> None:
        if not ended:
            return
        self._boundaries.end_step()
        self._by_step.append(self._losses)
        self._losses = []
        self.total_steps += 1
        is_warm = self.total_steps == self._warmup
        parameters = (p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"])
        is_edge = is_warm or self.total_steps == self._warmup + self._target  # of the measured steps: work may still be queued
        if is_edge and any(p.device.type != "cpu" for p in parameters):
            torch.accelerator.synchronize()
        if is_warm:
            self._began_s = perf_counter()
        self._ended_s = perf_counter()
        enough = self.num_steps > 0 and self._has_enough()
        self.on_step()
        if is_warm:
            self.on_warmup_end()
        if enough:
            self.on_enough()

    def _has_enough(self) -> bool:
        if self._target:
            return self.num_steps >= self._target
        least = MIN_STEPS if self.seconds > PATIENCE * self._target_s else 2 * MIN_STEPS
        return self.num_steps >= least and self.seconds >= self._target_s
