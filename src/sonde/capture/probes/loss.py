"""The losses of a step: read where they are handed to backward, averaged over the step, unscaled where a GradScaler scaled them."""

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from sonde.capture.incident_types import Incident, SpikeIncident
from sonde.capture.probes.finite_check import report_nonfinite
from sonde.capture.probes.probe import Probe, ProbeContext
from sonde.events import NonFinite, NotMeasured
from sonde.spike_detection import LossBound
from sonde.statistics import reductions
from sonde.statistics.find_tensors import read_scalar
from sonde.statistics.private_torch_api import loss_scale_tensor
from sonde.statistics.statistics_without_extension import measurable
from sonde.statistics.statistics_without_extension import reason as describe_error

MAX_REASONS = 8  # why losses could not be read: each is recorded once


class LossProbe(Probe):
    """Records the loss of every step, and finds losses that are not finite or far above the recent ones."""

    name = "loss"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._sums: dict[str, tuple[float, int]] = {}  # by series: sum and number of the losses of this step
        self._on_device: dict[str, list[torch.Tensor]] = {}  # by series: losses that are on a device
        self._scale_on_device: torch.Tensor | None = None
        self._reasons: set[str] = set()  # why losses could not be read
        self._recent: defaultdict[str, LossBound] = defaultdict(LossBound)  # by series

    def on_optimizer_created(self, optimizer: torch.optim.Optimizer) -> None:
        """A new optimizer trains another model or another task: its losses are not compared with those before."""
        self._recent.clear()

    def on_loss_scaled(self, scaler: Any) -> None:
        state = self._state
        scale = loss_scale_tensor(scaler) if scaler.is_enabled() else None
        number = None if scale is None else read_scalar(scale)
        state.loss_scale = state.scalars["loss_scale"] = math.nan if number is None else number
        self._scale_on_device = scale.detach().clone() if scale is not None and number is None else None
        state.is_loss_scaled = scale is not None
        state.loss_scale_backoff = scaler.get_backoff_factor() if scaler.is_enabled() else math.nan

    def on_backward_start(self, tensors: Any) -> Incident | None:
        if isinstance(tensors, (list, tuple)):
            tensors = _total(tensors)
        if not isinstance(tensors, torch.Tensor) or tensors.numel() != 1:
            what = f"a tensor of shape {list(tensors.shape)}" if isinstance(tensors, torch.Tensor) else "several tensors"
            self._note_unread(f"backward started from {what}")
            return None
        state = self._state
        series = self._context.call_sites.loss_series(state.number)
        value = state.loss = self._read(series, tensors)
        if value - value == 0:
            # A closure may try points that are far off.
            return self._check_spike(series, value) if state.optimizer is None or state.hints.has_single_closures else None
        return report_nonfinite(state, "loss", series, tensors) if self._is_known else None

    def _read(self, series: str, loss: torch.Tensor) -> float:
        """The loss; NaN also where it is on a device, and nobody waits for it."""
        value = reductions.read_element(loss)
        if value is None:
            value = read_scalar(loss)
        self._is_known = value is not None
        if value is None:
            try:
                self._on_device.setdefault(series, []).append(_first_element(measurable(loss)))
            except Exception as error:  # a meta or fake tensor holds no number, and a class of tensors may lack an operation
                self._note_unread(describe_error(error))
            return math.nan
        if not math.isnan(self._state.loss_scale):
            value /= self._state.loss_scale
        if self._state.hints.loss_divisor is not None:
            value *= self._state.hints.loss_divisor()
        self._state.last_loss = value
        total, num = self._sums.get(series, (0.0, 0))
        self._sums[series] = (total + value, num + 1)
        return value

    def _note_unread(self, reason: str) -> None:
        if reason not in self._reasons and len(self._reasons) < MAX_REASONS:
            self._reasons.add(reason)
            self._recorder.emit(NotMeasured(probe=self.name, where="", reason=f"the loss could not be read: {reason}"), self._state.number)

    def _check_spike(self, series: str, value: float) -> SpikeIncident | None:
        leap = self._recent[series].update(value)
        return None if leap is None else SpikeIncident(step=self._state.number, what="loss", where=series, leap=leap)

    def on_step_end(self) -> None:
        for series, (total, num) in self._sums.items():
            self._state.scalars[series] = total / num
        for series, losses in self._on_device.items():
            divisor = self._state.hints.loss_divisor
            try:
                scale = self._scale_on_device if self._scale_on_device is not None else torch.ones_like(losses[0])
                mean = torch.stack(losses).mean().reshape(1) * (divisor() if divisor is not None else 1.0)
                numbers = torch.cat([mean, _first_element(scale).to(mean.device)])
            except Exception as error:  # an operation that the user's class of tensors does not have
                self._note_unread(describe_error(error))
                continue
            self._context.deferred.add(numbers, partial(self._on_fetched, self._state.number, series))
        self._sums.clear()
        self._on_device.clear()
        self._scale_on_device = None

    def log_deferred(self, name: str, value: torch.Tensor, step: int) -> None:
        """A number of the user's that is on a device."""
        self._context.deferred.add(_first_element(value), partial(self._on_log_fetched, step, name))

    def _on_fetched(self, step: int, series: str, numbers: Sequence[float] | Exception) -> None:
        if isinstance(numbers, Exception):
            self._note_unread(describe_error(numbers))  # the step's loss stays unknown
            return
        loss = self._state.last_loss = numbers[0] / numbers[1]
        self._recorder.scalars_of(step)[series] = loss
        if not math.isfinite(loss):
            self._recorder.emit(NonFinite(what="loss", where=series, num_elements=1), step)

    def _on_log_fetched(self, step: int, name: str, numbers: Sequence[float] | Exception) -> None:
        if not isinstance(numbers, Exception):
            self._recorder.log(step, {name: numbers[0]})


def _total(losses: Sequence[Any]) -> Any:
    """What `torch.autograd.backward([loss, other])` minimizes: the sum, if all of them are single numbers."""
    if not losses or not all(type(loss) is torch.Tensor and loss.numel() == 1 for loss in losses):
        return losses
    if len(losses) == 1:
        return losses[0]
    try:
        return torch.stack([loss.detach().reshape(()) for loss in losses]).sum()
    except RuntimeError:  # of several devices
        return losses


def _first_element(value: torch.Tensor) -> torch.Tensor:
    return value.detach().reshape(-1)[:1].to(torch.float32)
