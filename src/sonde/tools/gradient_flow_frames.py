"""Gradients of one step as plain numbers: what each layer's gradient measures, and all layers side by side in a frame."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sonde.tools.tensor_statistics import Quick


@dataclass(frozen=True, slots=True)
class Size:
    """How large a gradient is. Sizes of the parameters of one layer join to the size of the layer."""

    num: int
    l1: float  # like `l2` and `max_abs` over the finite elements
    l2: float
    max_abs: float
    zeros: int
    nan: int
    inf: int

    @classmethod
    def of(cls, found: Quick) -> Size:
        return cls(found.num, found.l1, found.l2, found.max_abs if found.num_finite else 0.0, found.zeros, found.nan, found.inf)

    @property
    def is_finite(self) -> bool:
        return not (self.nan or self.inf)

    @property
    def is_zero(self) -> bool:
        """There are numbers, and all of them are zero to the last bit."""
        return self.num > 0 and self.zeros == self.num

    def of_all(self, over_finite: float) -> float:
        """A number over all elements: what torch would give for a tensor that holds NaN or Inf."""
        return math.nan if self.nan else math.inf if self.inf else over_finite

    @property
    def norm(self) -> float:
        return self.of_all(self.l2)

    @property
    def mean_abs(self) -> float:
        return self.of_all(self.l1 / self.num if self.num else 0.0)


def joined(sizes: Iterable[Size]) -> Size:
    """The size of several gradients taken as one."""
    parts = list(sizes)
    return Size(
        num=sum(part.num for part in parts),
        l1=math.fsum(part.l1 for part in parts),
        l2=math.hypot(*(part.l2 for part in parts)),
        max_abs=max((part.max_abs for part in parts), default=0.0),
        zeros=sum(part.zeros for part in parts),
        nan=sum(part.nan for part in parts),
        inf=sum(part.inf for part in parts),
    )


@dataclass(frozen=True, slots=True)
class LayerGradient:
    """One layer in one frame. NaN and infinities in the gradient are in its numbers, too."""

    name: str
    mean_abs_grad: float
    max_abs_grad: float
    grad_norm: float  # L2
    is_vanishing: bool
    is_exploding: bool
    flow_intensity: float  # norm over the largest finite norm of the frame, from 0 to 1; 1 where it is not finite

    @property
    def has_issue(self) -> bool:
        return self.is_vanishing or self.is_exploding


@dataclass(frozen=True, slots=True)
class GradientFrame:
    """The layers of one step, sorted by name."""

    step: int
    layers: tuple[LayerGradient, ...]

    @property
    def has_issue(self) -> bool:
        return any(layer.has_issue for layer in self.layers)

    @property
    def total_norm(self) -> float:
        """The L2 norm of all layers together: what clip_grad_norm_ compares with its limit."""
        return math.hypot(*(layer.grad_norm for layer in self.layers))


def frame_of(step: int, sizes: Mapping[str, Size], *, vanishing_threshold: float, exploding_threshold: float) -> GradientFrame:
    """Sizes side by side, judged by absolute thresholds."""
    largest = max((size.l2 for size in sizes.values() if math.isfinite(size.norm)), default=0.0)
    layers = []
    for name in sorted(sizes):
        size = sizes[name]
        norm, mean_abs = size.norm, size.mean_abs
        layers.append(
            LayerGradient(
                name=name,
                mean_abs_grad=mean_abs,
                max_abs_grad=size.of_all(size.max_abs),
                grad_norm=norm,
                is_vanishing=mean_abs < vanishing_threshold,
                is_exploding=not size.is_finite or size.max_abs > exploding_threshold,
                flow_intensity=(norm / largest if largest > 0 else 0.0) if math.isfinite(norm) else 1.0,
            )
        )
    return GradientFrame(step, tuple(layers))
