"""What is done about an incident: search for the origin of a bad number, attribute a spike, explain a skipped update, find a leak.

A session creates the handlers at the first incident, so a healthy training loads none of this. No handler runs code of the user in the
training process: what has to run again runs in a forked child (`replay_search`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from sonde.capture.step_tracker import StepTracker
from sonde.config import DebugConfig

if TYPE_CHECKING:
    from sonde.incidents.search_cause_in_child import ReplaySearches


@dataclass(frozen=True, slots=True)
class HandlerContext:
    """What handlers work with."""

    config: DebugConfig
    tracker: StepTracker
    run: Path
    models_by_name: Callable[[], Mapping[str, nn.Module]]
    trained_models: Callable[[], Iterable[tuple[nn.Module, Optimizer | None]]]  # each with its optimizer, where there is exactly one
    searches: ReplaySearches
