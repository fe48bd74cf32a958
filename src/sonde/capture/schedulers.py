"""The course of a training: who sets the learning rates and by which plan, and each new pass over the data. Told when it happens, which is
rare; how often schedulers step is counted with the steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import lr_scheduler
from torch.utils.data.dataloader import _DatasetKind

from sonde.capture.call_site import describe_line, user_frame
from sonde.capture.contained import contained
from sonde.capture.epoch_loop import enclosing_epoch_loop, lines_of_callers
from sonde.capture.learning_rates import rate_of

if TYPE_CHECKING:
    from sonde.capture.step_tracker import Loop

MAX_TOLD = 200  # schedulers, two events each: some programs make one for every parameter
MAX_PASSES = 2000  # events: what begins a loader more often than that has no epochs
RESTARTS = 16  # passes that began one step after the other: the loader is asked for single batches, and no pass is told any more
MAX_LIST = 64  # milestones

PLAN = (
    "total_steps", "T_max", "T_0", "T_mult", "step_size", "milestones", "_milestones", "gamma", "total_iters", "total_size", "start_factor",
    "end_factor", "factor", "patience", "eta_min", "power",
)  # fmt: skip
"""Attributes in which schedulers keep what they were told; a scheduler of the user's may have some of them too."""


@dataclass(slots=True)
class _Known:
    index: int
    has_stepped: bool = False


@dataclass(slots=True)
class _Loader:
    index: int
    loader: weakref.ref[Any]
    num_batches: int | None
    num_passes: int = 0
    last_step: int = -2
    in_a_row: int = 0


class Course:
    __slots__ = ("__dict__", "_schedulers")  # see beat.py

    def __init__(self, loop: Loop) -> None:
        self._loop, self._journal, self._clock = loop, loop._journal, loop.clock
        self._schedulers: dict[int, _Known] = {}
        self._num_schedulers = 0
        self._loaders: dict[int, _Loader] = {}
        self._num_loaders = self._num_passes = 0
        self._since = lines_of_callers()

    # -- schedulers --------------------------------------------------------------------------------

    def made(self, scheduler: Any) -> None:
        optimizer: Any = getattr(scheduler, "optimizer", None)
        while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            optimizer = optimizer.optimizer  # a framework's wrapper, which itself never steps
        if not isinstance(optimizer, torch.optim.Optimizer) or not self._loop._concerns(optimizer) or self._num_schedulers >= MAX_TOLD:
            return
        place = self._loop._open(optimizer).index
        known = self._schedulers[id(scheduler)] = _Known(self._num_schedulers)
        self._num_schedulers += 1
        frame = user_frame()
        line, text = describe_line(frame) if frame else ("", "")
        parts = [self._schedulers[id(part)].index for part in getattr(scheduler, "_schedulers", ()) if id(part) in self._schedulers]
        groups = optimizer.param_groups[:MAX_LIST]
        self._journal.event(
            "scheduler", self._clock.number, **{"class": type(scheduler).__name__}, scheduler=known.index, optimizer=place,
            rates=[rate_of(group) for group in groups],
            initial=[rate_of({"lr": group.get("initial_lr")}) for group in groups],
            plan={name.strip("_"): plain for name in PLAN if (plain := _plain(vars(scheduler).get(name))) is not None},
            parts=parts, heard=_is_heard(type(scheduler)), last_epoch=_plain(getattr(scheduler, "last_epoch", None)),
            source=line, text=text,
        )  # fmt: skip

    def stepped(self, scheduler: Any, *, given: bool) -> None:
        """`given`: with an argument, which for most sets where on its plan it is."""
        known = self._schedulers.get(id(scheduler))
        if known is None:
            self.made(scheduler)  # before anybody listened
            known = self._schedulers.get(id(scheduler))
        if known is None or known.has_stepped:
            return
        known.has_stepped = True
        frame = user_frame()
        line, text = describe_line(frame) if frame else ("", "")
        self._journal.event(
            "scheduler_begins", self._clock.number, scheduler=known.index, given=given,
            before_optimizer=self._clock.number == 0 and not self._clock.num_stepped and not _has_stepped(scheduler),
            last_epoch=_plain(getattr(scheduler, "last_epoch", None)), source=line, text=text,
        )  # fmt: skip

    # -- passes over the data ----------------------------------------------------------------------

    def pass_begins(self, loader: Any) -> None:
        if self._num_passes >= MAX_PASSES:
            return
        known = self._loaders.get(id(loader))
        if known is None or known.loader() is not loader:
            if len(self._loaders) >= MAX_TOLD:
                self._loaders = {key: each for key, each in self._loaders.items() if each.loader() is not None}
                if len(self._loaders) >= MAX_TOLD:
                    return
            known = self._loaders[id(loader)] = _Loader(self._num_loaders, weakref.ref(loader), _num_batches(loader))
            self._num_loaders += 1
        step = self._clock.number
        known.in_a_row = known.in_a_row + 1 if step == known.last_step + 1 else 0
        known.num_passes += 1
        known.last_step = step
        if known.in_a_row >= RESTARTS:
            return
        self._num_passes += 1
        last = known.in_a_row == RESTARTS - 1 or self._num_passes == MAX_PASSES  # of those that are told
        about = {"num": known.num_passes, "num_batches": known.num_batches, **({"last_told": True} if last else {})}
        self._journal.event("pass", step, loader=known.index, **about, **enclosing_epoch_loop(self._since))


class CourseHeard:
    """The part of the loop that hears of it."""

    @contained
    def scheduler_made(self: Loop, scheduler: Any) -> None:  # type: ignore[misc] # it is a part of one
        self._course.made(scheduler)

    @contained
    def scheduler_stepped(self: Loop, scheduler: Any, given: bool) -> None:  # type: ignore[misc] # it is a part of one
        self._journal.scalars["scheduler_steps"] += 1
        self._lines.learn("scheduler_step", self.clock.number)
        self._course.stepped(scheduler, given=given)

    @contained
    def pass_begins(self: Loop, loader: Any) -> None:  # type: ignore[misc] # it is a part of one
        self._course.pass_begins(loader)


def _plain(value: Any) -> float | list[float] | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, Iterable) and not isinstance(value, (str, torch.Tensor)):
        numbers = sorted(each for each in list(value)[:MAX_LIST] if isinstance(each, (int, float)))
        return list(numbers) if numbers else None
    return None


def _is_heard(kind: type) -> bool:
    """Its `step` is one of torch's, or calls it: a class that steps by itself may step and nobody hears."""
    owner = next((each for each in kind.__mro__ if "step" in vars(each)), None)
    return owner is not None and owner.__module__ == lr_scheduler.__name__


def _has_stepped(scheduler: Any) -> bool:
    """The optimizer did, as torch noted it, perhaps before anybody listened."""
    return bool(getattr(getattr(scheduler, "optimizer", None), "_opt_called", False))


def _num_batches(loader: Any) -> int | None:
    # Asking a loader over an IterableDataset for its length makes it warn later.
    if getattr(loader, "_dataset_kind", None) != _DatasetKind.Map:
        return None
    try:
        return len(loader)
    except Exception:  # a sampler without a length
        return None
