"""The optimizers: what they are, once, and their learning rates, one per parameter group, at every step."""

import math
from functools import cache
from typing import Any

import torch

from sonde.capture.probes.probe import Probe
from sonde.capture.user_source_line import describe_line, user_frame
from sonde.events import OptimizerCreated
from sonde.statistics.find_tensors import read_scalar
from sonde.statistics.private_torch_api import is_scheduled

MAX_RATES = 16  # optimizers, and groups of one
MAX_RECORDED = 1000  # optimizers, one event each: some programs construct a new one for every step
MAX_GROUPS = 64  # in one event


class LearningRateProbe(Probe):
    """Records each optimizer and the learning rates of its groups."""

    name = "learning_rate"

    def on_optimizer_created(self, optimizer: torch.optim.Optimizer) -> None:
        index = self._context.gradients.register(optimizer).index
        if index >= MAX_RECORDED:
            return
        line, text = describe_line(user_frame())
        # A scheduler holds it already; after loading a checkpoint there is an initial_lr without one.
        has_scheduler = is_scheduled(optimizer)
        groups = [
            {
                "lr": learning_rate(group), "num_parameters": len(group["params"]), "fused": group.get("fused"),
                "foreach": group.get("foreach"), "momentum": read_scalar(group.get("momentum") or 0),
                "device": group["params"][0].device.type if group["params"] else "",
                **({"initial_lr": learning_rate({"lr": group["initial_lr"]})} if has_scheduler and "initial_lr" in group else {}),
            }
            for group in optimizer.param_groups[:MAX_GROUPS]
        ]  # fmt: skip
        event = OptimizerCreated(class_name=type(optimizer).__name__, optimizer=index, groups=groups, source=line, text=text)
        self._recorder.emit(event, self._state.number)

    def on_optimizer_step_end(self, optimizer: torch.optim.Optimizer) -> None:
        # Rates are named by the order in which optimizers step: in a loop that constructs them anew, the first is still the first.
        place = min(self._state.num_optimizers_stepped, MAX_RATES - 1) + 1
        for index, group in enumerate(optimizer.param_groups[:MAX_RATES], 1):
            self._state.scalars[scalar_name(place, index)] = learning_rate(group)

    on_update_skipped = on_optimizer_step_end


def learning_rate(group: dict[str, Any]) -> float:
    """Of a parameter group; NaN where it has none or it is on a device."""
    rate = group.get("lr")
    if type(rate) is float:
        return rate
    number = None if rate is None else read_scalar(rate)
    return math.nan if number is None else number


@cache
def scalar_name(place: int, index: int) -> str:
    return "lr" if place == index == 1 else f"lr:{place}.{index}"
