"""What happened, what came of it, and the one exception that Sonde raises into a training on purpose."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sonde.conditions import Condition
from sonde.errors import SondeError
from sonde.statistics import reductions
from sonde.tools.fast_statistics import Quick, quick
from sonde.tools.hooks.hook import HookAction
from sonde.tools.tensor_statistics import shape_of


class TrainingStopped(SondeError):
    """A hook asked for the training to end, and this is a point where every parameter is as a whole number of updates left it."""

    exit_code = 1

    def __init__(self, message: str, *, hook: str = "", layer: str = "", step: int = 0) -> None:
        super().__init__(message)
        self.hook, self.layer, self.step = hook, layer, step
        self.num_updates = 0  # so many were made when it was raised


class HookEvent:
    """A tensor that passed a layer, or (with `layer` empty and no tensor) a step: what callbacks get. Valid during the call.

    `tensor` is the live one, detached: look at it, copy what you need, do not change or keep it.
    """

    __slots__ = ("_known", "_stats", "_values", "is_forward", "item", "layer", "metadata", "shape", "step", "tensor")

    def __init__(
        self,
        layer: str,
        tensor: Tensor | None,
        known: Mapping[str, float],
        *,
        step: int,
        is_forward: bool = True,
        item: str = "",
        shape: tuple[int, ...] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.layer, self.step, self.is_forward, self.item = layer, step, is_forward, item
        self.tensor = tensor.detach() if tensor is not None else None
        self.shape: tuple[int, ...] = shape if shape is not None else shape_of(tensor) if tensor is not None else ()
        self.metadata: Mapping[str, Any] = metadata or {}
        self._known = known
        self._stats: Quick | None = None
        self._values: dict[str, float] | None = None

    @property
    def stats(self) -> Quick | None:
        """Statistics of the tensor, measured when somebody asks first; None where there is no tensor."""
        if self._stats is None and self.tensor is not None:
            self._stats = quick(self.tensor)
        return self._stats

    @property
    def is_anomaly(self) -> bool:
        """Whether an element is NaN or infinite: one fast read, and no statistics where all is well."""
        return self.tensor is not None and reductions.check_finite([self.tensor])[1] >= 0

    @property
    def grad_norm(self) -> float:
        """The L2 norm of the tensor as it is: NaN or infinite where an element is."""
        found = self.stats
        if found is None or found.unsupported or found.nan:
            return math.nan
        return math.inf if found.inf else found.l2

    @property
    def values(self) -> Mapping[str, float]:
        """Everything that a condition may ask about, by its names."""
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
        """The answer to a condition; the tensor is measured only if the rest does not settle it."""
        answer = condition.decide(self._known)
        return condition.decide(self.values) if answer is None and self.tensor is not None else answer

    def __repr__(self) -> str:
        what = "step" if self.tensor is None else "output" if self.is_forward else "gradient"
        place = f" of {self.layer}" if self.layer else ""
        return f"<HookEvent: {what}{place} in step {self.step}, shape {self.shape}>"


_STATISTICS = ("mean", "std", "min", "max", "mean_abs", "max_abs", "l1", "l2", "zeros", "zero_share", "num", "nan", "inf")


@dataclass(frozen=True, slots=True)
class HookResult:
    """What one action of one hook did."""

    hook: str  # its id
    action: HookAction
    layer: str
    step: int
    is_forward: bool
    item: str = ""  # which tensor, where a layer puts out several
    shape: tuple[int, ...] = ()
    stats: Quick | None = None
    value: Any = field(default=None)  # an Alert, the path of a snapshot, a gradient norm, what a callback returned
    error: str = ""  # why it failed, if it did
