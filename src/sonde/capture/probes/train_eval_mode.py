"""Train or eval: how many modules depend on it, and how many are in eval while gradients are made."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from sonde.capture.probes.base import Probe, Tools
from sonde.capture.watched_model import Watched


class Modes(Probe):
    name = "modes"

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._modules: dict[int, tuple[int, list[weakref.ref[nn.Module]]]] = {}  # by watched model: its version, its modules

    def entered(self, watched: Watched, module: nn.Module, args: Any, kwargs: Any) -> None:
        if watched.doors_used:
            return  # another part of a model that has been looked at in this step
        known = self._modules.get(id(watched))
        if known is None or known[0] != watched.version:
            known = self._modules[id(watched)] = (watched.version, [weakref.ref(part) for part in watched.mode_modules()])
        num = num_in_eval = 0
        for ref in known[1]:
            part = ref()
            if part is not None:
                num += 1
                num_in_eval += not part.training
        self._journal.scalars["mode_modules"] += num
        self._journal.scalars["mode_modules_in_eval"] += num_in_eval
