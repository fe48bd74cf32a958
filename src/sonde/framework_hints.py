"""What a framework that runs the training can tell the session that watches it, and a loop of one's own need not: the session sees those
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from sonde.capture.watched_model import is_compiled
from sonde.events import STEP_SCALARS
from sonde.session import DebugSession

PROBE = "integration"  # under which name its errors are counted


def tell(session: DebugSession, kind: str, /, **data: Any) -> None:
    """Something that happened once."""
    loop = session._loop
    if loop is not None:
        session._journal.event(kind, loop.clock.number, **data)


def keep(session: DebugSession, values: Mapping[str, Any]) -> None:
    """Numbers and texts that the framework logs; anything else is passed over. What a step has under the same name is kept apart."""
    session.log(**{
        f"logged/{name}" if name in STEP_SCALARS else name: value
        for name, value in values.items()
        if isinstance(value, (int, float, str)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    })  # fmt: skip


def divides_losses(session: DebugSession, by: Callable[[], float]) -> None:
    """Losses are divided before backward, as is done when gradients are accumulated: what is recorded is undivided."""
    loop = session._loop
    if loop is not None:
        loop._losses.divided_by = by


def calls_backward(session: DebugSession) -> None:
    """Not the user's code calls backward: what made the loss is a function of theirs that has returned it."""
    loop = session._loop
    if loop is not None:
        loop.kept.library_calls_backward = True


def has_single_closures(session: DebugSession) -> None:
    """Optimizers are called with a closure that they run once: its loss is the loss of the step, as without."""
    loop = session._loop
    if loop is not None:
        loop.single_closures = True


def calls_parts_of(session: DebugSession, model: nn.Module) -> None:
    """Not the model itself is called, but a method of it, which calls its parts: they are looked for in the first steps."""
    if session._loop is not None and not any(is_compiled(part) for part in model.modules()):
        session._discovery.find_doors()


def caught(session: DebugSession, hook: str, error: Exception) -> None:
    session._faults.caught(PROBE, hook, error)


def hears(session: DebugSession, hook: str) -> bool:
    """Is it open, and this hook not one that has failed too often?"""
    return session._loop is not None and (PROBE, hook) not in session._faults.retired
