"""What a user passes to diagnostics: the architecture of a model, and the metrics of a training step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any

from sonde.errors import SondeError, require_count

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArchitectureInfo:
    """What a model consists of. Only the number of parameters is required; what is not known is None."""

    total_parameters: int  # each once, however many modules share it
    trainable_parameters: int | None = None
    model_size_mb: float | None = None  # parameters and buffers, MiB
    layer_count: int | None = None  # modules with parameters of their own
    layer_types: Mapping[str, int] = field(default_factory=dict)  # of all leaves, by class
    depth: int | None = None  # layers with weights, one after the other, on the longest path from an input to an output
    depth_known_by: str = ""  # "a forward pass", or what makes it only an upper bound
    width: int | None = None  # units of the widest layer
    receptive_field: tuple[int, ...] | None = None  # of one unit of the last convolution, by spatial dimension; None: no convolutions
    receptive_stride: tuple[float, ...] | None = None  # distance in the input between neighboring units of it
    receptive_note: str = ""  # why it is not known, if there are convolutions
    name: str = ""  # the class of the model

    def __post_init__(self) -> None:
        for name in ("total_parameters", "trainable_parameters", "layer_count", "depth", "width"):
            value = getattr(self, name)
            if value is not None or name == "total_parameters":
                require_count(value, name, minimum=0)
        if self.model_size_mb is not None:
            object.__setattr__(self, "model_size_mb", _number("model_size_mb", self.model_size_mb))
        if not isinstance(self.layer_types, Mapping):
            raise SondeError(f"layer_types must map classes to counts, for instance {{'Linear': 3}}, not {self.layer_types!r}.")
        if self.trainable_parameters is not None and self.trainable_parameters > self.total_parameters:
            raise SondeError(f"{self.trainable_parameters} parameters cannot be trainable: there are {self.total_parameters} in all.")

    @property
    def trainable_share(self) -> float | None:
        trainable, total = self.trainable_parameters, self.total_parameters
        return None if trainable is None or not total else trainable / total

    @property
    def bytes_per_parameter(self) -> float | None:
        """Above 4 for float32: buffers, or wider numbers."""
        return None if self.model_size_mb is None or not self.total_parameters else self.model_size_mb * MIB / self.total_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPerformanceMetrics:
    """The metrics of one step. Only the step and its loss are required; the loss may be NaN or Inf."""

    training_step: int
    loss: float
    accuracy: float | None = None
    learning_rate: float | None = None
    batch_size: int | None = None
    throughput_samples_per_sec: float | None = None
    memory_usage_mb: float | None = None  # MiB
    gpu_utilization: float | None = None  # 0 to 1; above 1 it is a percentage
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    gradient_norm: float | None = None
    step_time_ms: float | None = None
    timestamp: float | datetime | None = None  # when: seconds since 1970, or a datetime

    def __post_init__(self) -> None:
        require_count(self.training_step, "training_step", minimum=0)
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name not in ("training_step", "timestamp") and (value is not None or one.name == "loss"):
                object.__setattr__(self, one.name, _number(one.name, value))
        for name in ("batch_size", "throughput_samples_per_sec", "memory_usage_mb", "gpu_utilization", "step_time_ms", "gradient_norm"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise SondeError(f"{name} cannot be below 0; in step {self.training_step} it is {value:g}.")
        if self.timestamp is not None and not isinstance(self.timestamp, datetime):
            object.__setattr__(self, "timestamp", _number("timestamp", self.timestamp))
        if self.gpu_utilization is not None and self.gpu_utilization > 1:
            if self.gpu_utilization > 100:
                raise SondeError(f"gpu_utilization is a share, 0 to 1, or a percentage up to 100; this is {self.gpu_utilization:g}.")
            object.__setattr__(self, "gpu_utilization", self.gpu_utilization / 100)


def _number(name: str, value: Any) -> float | int:
    """A number; a tensor or an array of one element is one too."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):
        raise SondeError(f"{name} must be one number, not {value!r} of type {type(value).__name__}.") from None


def or_nan(value: float | None) -> float:
    """For arithmetic: NaN if it is not known."""
    return math.nan if value is None else value
