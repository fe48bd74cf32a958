"""The lines of the user's code from which the loop calls torch."""

from typing import Any

import torch
from torch import nn

from sonde.capture.describe_dataloader import describe_loader
from sonde.capture.probes.probe import Probe


class SourceLineProbe(Probe):
    """Records the first lines of each kind of call. The lines of backward are recorded with the losses."""

    name = "source_lines_of_torch_calls"

    def on_phase_start(self, phase: str, owner: Any) -> None:
        details = describe_loader(owner) if phase == "data" else {}
        self._context.call_sites.learn("loader" if phase == "data" else phase, self._state.number, **details)

    def on_forward_start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._context.call_sites.learn("forward", self._state.number)

    def on_eval_forward_start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() and not self._state.scalars["forwards"]:
            self._context.call_sites.learn("eval_forward", self._state.number)

    def on_zero_grad(self, owner: Any) -> None:
        self._context.call_sites.learn("zero_grad", self._state.number)

    def on_clip(self, limit: Any) -> None:
        scalars = self._state.scalars
        num_updates = scalars["optimizer_steps"] + scalars["skipped_steps"]
        is_after_update = (self._state.number > 0 or num_updates > 0) and scalars["backwards"] <= num_updates
        self._context.call_sites.learn("clip", self._state.number, is_after_update=is_after_update or None)

    def on_optimizer_step_start(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        entry = self._state.optimizer
        self._context.call_sites.learn("optimizer_step", self._state.number, optimizer=entry.index if entry is not None else 0)

    def on_scheduler_step(self, scheduler: Any, has_argument: bool) -> None:
        self._context.call_sites.learn("scheduler_step", self._state.number)
