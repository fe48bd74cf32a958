"""Incidents: what a probe returns when it sees something that has to be dealt with at once, before torch goes on."""

from dataclasses import dataclass

import torch

from sonde.capture.step_inputs_for_replay import ForwardCall
from sonde.events import NonFinite
from sonde.spike_detection import Spike


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteIncident:
    """The loss, a gradient or an input holds NaN or Inf. The event is written before handlers act."""

    step: int
    event: NonFinite
    tensor: torch.Tensor
    is_loss_scaled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationIncident:
    """A model put out NaN or Inf in evaluation. An Inf alone may be meant (masked logits): a handler decides whether it is recorded."""

    step: int
    event: NonFinite
    call: ForwardCall
    is_only_inf: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeIncident:
    """The loss or a gradient norm is far above its recent values."""

    step: int
    what: str  # "loss" or "gradient"
    where: str  # the series
    leap: Spike


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedUpdateIncident:
    """A GradScaler holds back the optimizer of these parameters."""

    step: int
    parameters: list[torch.Tensor]
    scale: float
    backoff: float  # what the scaler will multiply its scale with


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGrowthIncident:
    """Memory grows without end, or graphs of earlier steps stay alive."""

    step: int


Incident = NonFiniteIncident | EvaluationIncident | SpikeIncident | SkippedUpdateIncident | MemoryGrowthIncident
