"""What a probe is: something that measures one aspect of an observed step, at the moments that it is told of.

A probe is only called on observed steps. It plans names and rows once, turns tensors into rows of numbers, and writes them when the step is
over. An error of its own is caught by the loop, counted, and retires the probe when it comes again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from sonde.capture.error_isolation import Faults
from sonde.capture.model_registry import Models
from sonde.capture.recorder import Journal
from sonde.capture.standins import Desk
from sonde.capture.watched_model import Watched
from sonde.config import DebugConfig, Measured
from sonde.statistics.table import StatisticsTable

NOW_AND_THEN, RARELY, LONG_RUN = 8, 64, 1024  # every so many steps, and every so many where the run is as long as that
EXPONENTS_FIRST = (0, 4, 16)  # observed steps on which histograms are taken
EXPONENTS_EVERY = 64  # and then: they change slowly and cost more than the statistics


def is_now_and_then(step: int) -> bool:
    return step % (NOW_AND_THEN if step < LONG_RUN else RARELY) == 0


@dataclass(frozen=True, slots=True)
class Tools:
    """What probes are given to work with."""

    journal: Journal
    config: DebugConfig
    faults: Faults
    models: Models
    desk: Desk
    measured: Measured


class Probe:
    """The moments of an observed step, in order. A probe overrides those that matter to it."""

    name: ClassVar[str]

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._journal = tools.journal
        self.wanted = True  # by the settings; the others are not told of anything

    def begin(self, step: int, *, with_exponents: bool) -> None:
        """An observed step begins. Exponent histograms are taken on some of them."""

    def fetched(self, batch: Any) -> None:
        """A data loader handed out a batch."""

    def entered(self, watched: Watched, module: nn.Module, args: Any, kwargs: Any) -> None:
        """With gradients on, the first forward of this step is about to run through this module: a model, or a part of one that is called
        from outside."""

    def left(self, watched: Watched, output: Any) -> None:
        """That forward is over, one way or another; without an output if it failed."""

    def evaluated(self, watched: Watched, module: nn.Module, args: Any, kwargs: Any, step: int) -> None:
        """In any step, observed or not: without gradients, a forward is about to run through a module that is in training mode."""

    def backward(self, tensors: Any) -> None:
        """A backward is about to run from these."""

    def before(self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], *, closure: bool) -> None:
        """An optimizer is about to step; with a closure, the gradients that count are made inside of it."""

    def after(self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], *, closure: bool) -> None:
        """An optimizer has stepped."""

    def tables(self) -> Iterable[StatisticsTable]:
        """The step is over: what was measured, in case that some of it is still on a device and has to be brought over."""
        return ()

    def write(self, step: int) -> None:
        """The step is over: frames and scalars go to the journal."""

    def now_and_then(self, step: int) -> None:
        """A step ends that `is_now_and_then`, observed or not. Only for what takes microseconds."""

    def clear(self) -> None:
        """Forget the step, whatever became of it."""

    def rest(self) -> None:
        """Watching pauses or ends: whatever was put into torch is taken out."""
