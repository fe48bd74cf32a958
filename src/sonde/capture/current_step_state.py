"""The facts of the step that is under way: written by the tracker and by earlier probes, read by later ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from sonde.capture.watched_model import WatchedModel
    from sonde.capture.zero_grad_tracking import OptimizerGradients


@dataclass(slots=True)
class TrainingHints:
    """What a framework that runs the training knows of it, and a session cannot see."""

    has_single_closures: bool = False  # optimizers run their closure exactly once, so its loss is the loss of the step
    library_calls_backward: bool = False  # the loss is made in a function of the user's that has returned by then
    loss_divisor: Callable[[], float] | None = None  # what each loss is divided by before backward, as in gradient accumulation


@dataclass(slots=True)
class CurrentStep:
    """The running step. `scalars` is what its record will hold."""

    scalars: dict[str, float]
    number: int = 0
    is_observed: bool = False
    with_histograms: bool = False  # exponent histograms are taken in this step
    hints: TrainingHints = field(default_factory=TrainingHints)
    # the forward that is under way, or was last
    model: WatchedModel | None = None
    is_first_forward: bool = False  # in this step, through this module
    # the loss
    loss: float = math.nan  # handed to backward last; NaN where it is on a device
    last_loss: float | None = None  # the last one that is known, of this step or of an earlier one
    loss_scale: float = math.nan  # of a GradScaler; NaN without one, and where it is on a device
    is_loss_scaled: bool = False
    loss_scale_backoff: float = math.nan  # factor that the GradScaler multiplies its scale with after a skipped step
    # the optimizer whose step is under way
    optimizer: OptimizerGradients | None = None
    has_closure: bool = False
    # sum of squares and first non-finite gradient of this optimizer, where they are measured already
    gradient_check: tuple[Optimizer, tuple[float, int]] | None = None
    num_optimizers_stepped: int = 0
    is_backward_unchecked: bool = False  # no optimizer will check the gradients of this backward before they are used
    nonfinite: set[tuple[str, int]] = field(default_factory=set)  # what was reported ("loss", "gradient" or "input"), and in which thread

    def start_step(self, number: int) -> None:
        """Forget the facts of the last step."""
        self.number = number
        self.loss = self.loss_scale = math.nan
        self.is_loss_scaled = False
        if self.nonfinite:
            self.nonfinite.clear()
