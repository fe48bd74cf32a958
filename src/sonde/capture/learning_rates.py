"""The optimizers: who they are, told once, and their learning rates, one per parameter group, in every step."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch

from sonde.capture.call_site import describe_line, user_frame
from sonde.capture.recorder import Journal
from sonde.statistics.tensor_utils import read_scalar

MOST = 16  # optimizers, and groups of one
MAX_TOLD = 1000  # optimizers, one event each: some programs make a new one for every step


class Rates:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def take(self, optimizer: torch.optim.Optimizer, num_stepped: int) -> None:
        """Named by the order in which optimizers step: in a loop that makes them anew, the first is still the first."""
        place = min(num_stepped, MOST - 1) + 1
        for index, group in enumerate(optimizer.param_groups, 1):
            if index > MOST:
                break
            self._journal.scalars[scalar_name(place, index)] = rate_of(group)


def tell_of(optimizer: torch.optim.Optimizer, index: int, journal: Journal, step: int) -> None:
    """An optimizer that is new."""
    if index >= MAX_TOLD:
        return
    frame = user_frame()
    line, text = describe_line(frame) if frame else ("", "")
    scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")  # a scheduler holds it already; a checkpoint brings initial_lr along, too
    groups = [
        {
            "lr": rate_of(group), "num_parameters": len(group["params"]), "fused": group.get("fused"), "foreach": group.get("foreach"),
            "momentum": read_scalar(group.get("momentum") or 0), "device": group["params"][0].device.type if group["params"] else "",
            **({"initial_lr": rate_of({"lr": group["initial_lr"]})} if scheduled and "initial_lr" in group else {}),
        }
        for group in optimizer.param_groups[:64]
    ]  # fmt: skip
    journal.event("optimizer", step, **{"class": type(optimizer).__name__}, optimizer=index, groups=groups, source=line, text=text)


def rate_of(group: dict[str, Any]) -> float:
    rate = group.get("lr")
    if type(rate) is float:
        return rate
    number = None if rate is None else read_scalar(rate)
    return math.nan if number is None else number


@cache
def scalar_name(place: int, index: int) -> str:
    return "lr" if place == index == 1 else f"lr:{place}.{index}"
