"""What happens in a training, as callbacks; who is subscribed to them, and in which threads nobody is called.

`patches.subscribe` is the way to subscribe: it also puts the patches in that call the subscribers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from threading import get_ident
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn

from sonde.statistics.private_torch_api import with_function_modes


class TrainingCallbacks:
    """What a subscriber is called for; every method does nothing unless it is overridden. A start is always followed by its end, also after
    an exception; except that an optimizer step that raises has no end, because torch does not call its hook then."""

    is_called_in_forks = False
    """Whether a forked child calls it too. A session belongs to the process that opened it; a tool that must end the script does not."""

    stand_in_for_forks: TrainingCallbacks | None = None
    """Called in its place in a forked child of the user."""

    def on_loader_start(self, loader: Any) -> None:
        """A DataLoader begins a pass over its data."""

    def on_batch_start(self) -> None:
        """The loop asks a DataLoader for the next batch."""

    def on_batch_end(self, batch: Any) -> None:
        """The batch is there; None where the loader is exhausted or failed."""

    def on_forward_start(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A forward of a module that is watched by `watch_forward` begins."""

    def on_forward_end(self, module: nn.Module, output: Any) -> Any:
        """That forward is over; `output` is None where it failed."""

    def on_backward_start(self, tensors: Any) -> Any:
        """A backward begins from these tensors."""

    def on_backward_end(self) -> Any:
        """That backward is over."""

    def on_zero_grad(self, owner: Any) -> None:
        """An optimizer or a module has cleared its gradients."""

    def on_clip(self, limit: Any) -> None:
        """Gradients have been clipped to this norm or value."""

    def on_optimizer_created(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has been constructed."""

    def on_optimizer_step_start(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> Any:
        """An optimizer is about to update its parameters."""

    def on_optimizer_step_end(self, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer has stepped."""

    def on_scheduler_created(self, scheduler: Any) -> None:
        """A learning-rate scheduler has been constructed."""

    def on_scheduler_step(self, scheduler: Any, has_argument: bool) -> None:
        """User code has called `scheduler.step()`."""

    def on_loss_scaled(self, scaler: Any) -> None:
        """A GradScaler has scaled a loss."""

    def on_scaler_step_start(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """A GradScaler is asked to step an optimizer."""

    def on_scaler_step_end(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """The GradScaler has stepped the optimizer, or skipped it."""

    def on_phase_start(self, phase: str, owner: Any) -> None:
        """A "data", "checkpoint" or "transfer" phase begins; for data, `owner` is the loader that starts its workers."""

    def on_phase_end(self, phase: str) -> None:
        """That phase is over."""

    def on_compile(self, target: Any) -> None:
        """A module or function is handed to torch.compile."""

    def on_suspend(self) -> None:
        """This thread calls no subscriber until `on_resume`."""

    def on_resume(self, suspended_ns: int) -> None:
        """Calls go on; the time that has passed belongs to no step."""


_subscribers: tuple[TrainingCallbacks, ...] = ()
_suspended_threads: set[int] = set()


def add_subscriber(callbacks: TrainingCallbacks) -> None:
    """Call it after those that are subscribed."""
    global _subscribers
    _subscribers = (*_subscribers, callbacks)


def remove_subscriber(callbacks: TrainingCallbacks) -> bool:
    """Stop calling it. Returns whether others are left."""
    global _subscribers
    _subscribers = tuple(other for other in _subscribers if other is not callbacks)
    return bool(_subscribers)


def subscribers() -> tuple[TrainingCallbacks, ...]:
    """Whom to call in this thread."""
    return () if _suspended_threads and get_ident() in _suspended_threads else _subscribers


def is_suspended() -> bool:
    """Whether this thread calls no subscriber now."""
    return bool(_suspended_threads) and get_ident() in _suspended_threads


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Inside, this thread calls no subscriber: for tools that run a model by themselves, which is not training. Modes of torch that the
    user has set are active for it."""
    thread = get_ident()
    if thread in _suspended_threads:
        yield
        return
    affected = _subscribers
    for each in affected:
        each.on_suspend()
    started = perf_counter_ns()
    _suspended_threads.add(thread)
    try:
        with with_function_modes():
            yield
    finally:
        _suspended_threads.discard(thread)
        for each in affected:
            each.on_resume(perf_counter_ns() - started)


def _keep_in_child() -> None:
    """A forked child has only the subscribers that ask for it, and stand-ins."""
    global _subscribers
    in_child = [each if each.is_called_in_forks else each.stand_in_for_forks for each in _subscribers]
    _subscribers = tuple(each for each in in_child if each is not None)
    _suspended_threads.clear()


def remove_stand_ins() -> None:
    """In a child that is not the user's."""
    global _subscribers
    _subscribers = tuple(each for each in _subscribers if each.is_called_in_forks)


os.register_at_fork(after_in_child=_keep_in_child)
