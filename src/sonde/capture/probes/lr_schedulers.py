"""Learning-rate schedulers: what each plans, and its first step."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import lr_scheduler

from sonde.capture.probes.learning_rate import learning_rate
from sonde.capture.probes.probe import Probe, ProbeContext
from sonde.capture.user_source_line import describe_line, user_frame
from sonde.events import SchedulerCreated, SchedulerStarted
from sonde.statistics.private_torch_api import has_optimizer_stepped, nested_schedulers

MAX_RECORDED = 200  # schedulers, two events each: some programs construct one for every parameter
MAX_LIST = 64  # milestones, groups

PLAN = (
    "total_steps", "T_max", "T_0", "T_mult", "step_size", "milestones", "_milestones", "gamma", "total_iters", "total_size", "start_factor",
    "end_factor", "factor", "patience", "eta_min", "power",
)  # fmt: skip
"""Attributes in which schedulers store their arguments; a scheduler of the user's may have some of them too."""


class SchedulerProbe(Probe):
    """Records each scheduler with its plan, and when it steps for the first time."""

    name = "lr_schedulers"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._indices: dict[int, int] = {}  # by id(scheduler)
        self._num_recorded = 0
        self._stepped: set[int] = set()  # indices

    def on_scheduler_created(self, scheduler: Any) -> None:
        optimizer = scheduled_optimizer(scheduler)
        if optimizer is None or not self._context.concerns(optimizer) or self._num_recorded >= MAX_RECORDED:
            return
        index = self._indices[id(scheduler)] = self._num_recorded
        self._num_recorded += 1
        line, text = describe_line(user_frame())
        groups = optimizer.param_groups[:MAX_LIST]
        event = SchedulerCreated(
            class_name=type(scheduler).__name__, scheduler=index, optimizer=self._context.gradients.register(optimizer).index,
            rates=[learning_rate(group) for group in groups],
            initial=[learning_rate({"lr": group.get("initial_lr")}) for group in groups],
            plan={name.strip("_"): plain for name in PLAN if (plain := _plain(vars(scheduler).get(name))) is not None},
            parts=[self._indices[id(part)] for part in nested_schedulers(scheduler) if id(part) in self._indices],
            is_step_counted=_is_step_patched(type(scheduler)), last_epoch=_plain(getattr(scheduler, "last_epoch", None)),
            source=line, text=text,
        )  # fmt: skip
        self._recorder.emit(event, self._state.number)

    def on_scheduler_step(self, scheduler: Any, has_argument: bool) -> None:
        if id(scheduler) not in self._indices:
            self.on_scheduler_created(scheduler)  # before anybody was subscribed
        index = self._indices.get(id(scheduler))
        if index is None or index in self._stepped:
            return
        self._stepped.add(index)
        state = self._state
        line, text = describe_line(user_frame())
        is_first = state.number == 0 and not state.num_optimizers_stepped and not has_optimizer_stepped(scheduler)
        event = SchedulerStarted(
            scheduler=index, has_argument=has_argument, is_before_optimizer=is_first,
            last_epoch=_plain(getattr(scheduler, "last_epoch", None)), source=line, text=text,
        )  # fmt: skip
        self._recorder.emit(event, state.number)


def scheduled_optimizer(scheduler: Any) -> torch.optim.Optimizer | None:
    """The optimizer of a scheduler, without the wrapper of a framework, which itself never steps."""
    optimizer: Any = getattr(scheduler, "optimizer", None)
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None


def _plain(value: Any) -> float | list[float] | None:
    if isinstance(value, (int, float)):
        return None if isinstance(value, bool) else value
    if isinstance(value, Iterable) and not isinstance(value, (str, torch.Tensor)):
        return sorted(each for each in list(value)[:MAX_LIST] if isinstance(each, (int, float))) or None
    return None


def _is_step_patched(kind: type) -> bool:
    """Whether its `step` is one of torch's: a class that steps by itself may step and nobody is called."""
    owner = next((each for each in kind.__mro__ if "step" in vars(each)), None)
    return owner is not None and owner.__module__ == lr_scheduler.__name__
