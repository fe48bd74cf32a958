"""HookEvent (the input of a hook), HookResult (its output), and TrainingStopped, which a hook raises into the training."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sonde.condition_expressions import Condition
from sonde.errors import SondeError
from sonde.statistics import reductions
from sonde.tools.hooks.hook_builder import HookAction
from sonde.tools.tensors.describe_tensor import FastStatistics, fast_statistics, shape_of


class TrainingStopped(SondeError):
    """Raised when a hook stops the training, always between two optimizer updates."""

    exit_code = 1

    def __init__(self, message: str, *, hook: str = "", layer: str = "", step: int = 0) -> None:
        super().__init__(message)
        self.hook, self.layer, self.step = hook, layer, step
        self.num_updates = 0  # completed updates when it was raised


class HookEvent:
    """An output or gradient of a layer, or a step (`layer` is empty and `tensor` None). The argument of callbacks, valid during the call.
    `tensor` is detached but shares memory with the live tensor: copy what you need, and do not change or store it."""

    def __init__(
        self, layer: str, tensor: Tensor | None, known: Mapping[str, float], *, step: int, is_forward: bool = True, item: str = "",
        shape: tuple[int, ...] | None = None, metadata: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.layer, self.step, self.is_forward, self.item = layer, step, is_forward, item
        self.tensor = tensor.detach() if tensor is not None else None
        self.shape: tuple[int, ...] = shape if shape is not None else shape_of(tensor) if tensor is not None else ()
        self.metadata = metadata or {}
        self._known = known
        self._stats: FastStatistics | None = None
        self._values: dict[str, float] | None = None

    @property
    def stats(self) -> FastStatistics | None:
        """Statistics of the tensor, measured at the first access; None without a tensor."""
        if self._stats is None and self.tensor is not None:
            self._stats = fast_statistics(self.tensor)
        return self._stats

    @property
    def is_anomaly(self) -> bool:
        """True if an element is NaN or infinite. Faster than `stats`."""
        return self.tensor is not None and reductions.check_finite([self.tensor])[1] >= 0

    @property
    def grad_norm(self) -> float:
        """The L2 norm of all elements: NaN or infinite if an element is."""
        found = self.stats
        return math.nan if found is None or found.unsupported or found.nan else math.inf if found.inf else found.l2

    @property
    def values(self) -> Mapping[str, float]:
        """All values that a condition may use, by name."""
        if self._values is None:
            self._values = dict(self._known)
            found = self.stats
            if found is not None and not found.unsupported:
                self._values |= {name: float(getattr(found, name)) for name in _STATISTICS}
                self._values["norm"] = found.l2
                if not self.is_forward:
                    self._values["grad_norm"] = self.grad_norm
        return self._values

    def decide(self, condition: Condition) -> bool | None:
        """The result of a condition; None if a value is missing. The tensor is measured only if the other values do not decide."""
        answer = condition.decide(self._known)
        return condition.decide(self.values) if answer is None and self.tensor is not None else answer

    def __repr__(self) -> str:
        kind = "step" if self.tensor is None else "output" if self.is_forward else "gradient"
        return f"<HookEvent: {kind}{f' of {self.layer}' if self.layer else ''} in step {self.step}, shape {self.shape}>"


_STATISTICS = ("mean", "std", "min", "max", "mean_abs", "max_abs", "l1", "l2", "zeros", "zero_share", "num", "nan", "inf")


@dataclass(frozen=True, slots=True)
class HookResult:
    """The result of one action of one hook."""

    hook: str  # id of the hook
    action: HookAction
    layer: str
    step: int
    is_forward: bool
    item: str = ""  # index of the tensor if a layer returns several
    shape: tuple[int, ...] = ()
    stats: FastStatistics | None = None
    value: Any = field(default=None)  # an Alert, the path of a snapshot, a gradient norm, or the return value of a callback
    error: str = ""  # the exception, if it failed
