"""The optimizers of the script, inside a trial: made with other switches where the trial says so, and noted."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from sonde.capture.gradient_state import optimizer_parameters
from sonde.tuning.call_site_keys import place_here
from sonde.tuning.messages import Optimizer, Place

SWITCHES = ("foreach", "fused")


class Optimizers:
    def __init__(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        self._changes = changes
        self._seen: dict[tuple[str, str], Optimizer] = {}

    def install(self) -> None:
        for kind in {each for each in vars(torch.optim).values() if isinstance(each, type) and issubclass(each, torch.optim.Optimizer)}:
            takes = tuple(name for name in SWITCHES if name in inspect.signature(kind).parameters)
            if takes and "__init__" in vars(kind):
                kind.__init__ = self._patched(kind.__init__, takes)  # type: ignore[method-assign]

    def _patched(self, make: Any, takes: tuple[str, ...]) -> Any:
        @functools.wraps(make)
        def __init__(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            place = place_here()
            make(optimizer, *args, **{**kwargs, **self._changes.get(place.key, {})})
            self._note(optimizer, place, takes)

        return __init__

    def facts(self) -> tuple[Optimizer, ...]:
        return tuple(self._seen.values())

    def _note(self, optimizer: torch.optim.Optimizer, place: Place, takes: tuple[str, ...]) -> None:
        name, parameters = type(optimizer).__name__, optimizer_parameters(optimizer)
        device = parameters[0].device.type if parameters else "cpu"
        self._seen[place.key, name] = Optimizer(place, name, takes, way_of(optimizer, device), len(parameters), device)


def way_of(optimizer: torch.optim.Optimizer, device: str) -> str:
    """How it walks over the parameters. Without a word from the user torch takes the loop on a CPU and foreach on a device."""
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return "fused"
    asked = group.get("foreach")
    return "foreach" if asked or (asked is None and device != "cpu") else "loop"
