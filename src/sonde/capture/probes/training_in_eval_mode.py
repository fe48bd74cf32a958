"""Train or eval mode: how many modules depend on it, and how many are in eval mode while gradients are made."""

import weakref
from typing import Any

from torch import nn

from sonde.capture.probes.probe import Probe, ProbeContext


class TrainEvalModeProbe(Probe):
    """Counts dropout and normalization layers, and those of them in eval mode, in forwards with gradients."""

    name = "training_in_eval_mode"
    OBSERVED_ONLY = True

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._modules: dict[int, tuple[int, list[weakref.ref[nn.Module]]]] = {}  # by watched model: its version, its modules

    def on_forward_start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        watched = self._state.model
        if watched is None or watched.entry_points_used:
            return  # another part of a model that was counted in this step
        known = self._modules.get(id(watched))
        if known is None or known[0] != watched.version:
            known = self._modules[id(watched)] = (watched.version, [weakref.ref(part) for part in watched.mode_modules()])
        alive = [part for ref in known[1] if (part := ref()) is not None]
        self._state.scalars["mode_modules"] += len(alive)
        self._state.scalars["mode_modules_in_eval"] += sum(not part.training for part in alive)
