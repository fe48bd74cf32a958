"""The learning rates of a step, one per parameter group."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch

from sonde.capture.journal import Journal
from sonde.capture.tensors import read_number

MOST = 16  # optimizers, and groups of one


class Rates:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def take(self, optimizer: torch.optim.Optimizer, num_stepped: int) -> None:
        """Named by the order in which optimizers step: in a loop that makes them anew, the first is still the first."""
        place = min(num_stepped, MOST - 1) + 1
        for index, group in enumerate(optimizer.param_groups, 1):
            if index > MOST:
                break
            self._journal.scalars[_name(place, index)] = rate_of(group)


def rate_of(group: dict[str, Any]) -> float:
    rate = group.get("lr")
    if type(rate) is float:
        return rate
    number = None if rate is None else read_number(rate)
    return math.nan if number is None else number


@cache
def _name(place: int, index: int) -> str:
    return "lr" if place == index == 1 else f"lr:{place}.{index}"
