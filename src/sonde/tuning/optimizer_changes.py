"""Patches the optimizers of torch.optim inside a trial: passes `foreach` or `fused` to their constructors and describes them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from sonde.capture.monkeypatch import override
from sonde.capture.zero_grad_tracking import optimizer_parameters
from sonde.tuning.stable_call_site_ids import call_site_here
from sonde.tuning.trial_messages import CallSite, OptimizerInfo

IMPLEMENTATIONS = ("foreach", "fused")


class OptimizerPatcher:
    """Patches the constructors of torch.optim for the rest of the process."""

    def __init__(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        self._changes = changes
        self._optimizers: dict[tuple[str, str], OptimizerInfo] = {}

    def install(self) -> None:
        for kind in {each for each in vars(torch.optim).values() if isinstance(each, type) and issubclass(each, torch.optim.Optimizer)}:
            supports = tuple(name for name in IMPLEMENTATIONS if name in inspect.signature(kind).parameters)
            if supports and "__init__" in vars(kind):
                override(kind, "__init__", functools.partial(self._wrap_init, supports))

    def _wrap_init(self, supports: tuple[str, ...], original: Any) -> Any:
        def __init__(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            site = call_site_here()
            original(optimizer, *args, **{**kwargs, **self._changes.get(site.key, {})})
            self._add(optimizer, site, supports)

        return __init__

    def describe(self) -> tuple[OptimizerInfo, ...]:
        return tuple(self._optimizers.values())

    def _add(self, optimizer: torch.optim.Optimizer, site: CallSite, supports: tuple[str, ...]) -> None:
        name, parameters = type(optimizer).__name__, optimizer_parameters(optimizer)
        device = parameters[0].device.type if parameters else "cpu"
        implementation = implementation_of(optimizer, device)
        self._optimizers[site.key, name] = OptimizerInfo(site, name, supports, implementation, len(parameters), device)


def implementation_of(optimizer: torch.optim.Optimizer, device: str) -> str:
    """How an optimizer updates its parameters. The default of torch is the loop on a CPU and foreach on an accelerator."""
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return "fused"
    foreach = group.get("foreach")
    return "foreach" if foreach or (foreach is None and device != "cpu") else "loop"
