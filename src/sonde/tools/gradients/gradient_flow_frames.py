"""Gradient sizes of one step: `LayerGradient` per layer, and a `GradientFrame` with all layers of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sonde.tools.tensors.basic_statistics import FastStatistics


@dataclass(frozen=True, slots=True)
class GradientSize:
    """Norms and counts of one gradient. `combine_sizes` adds up the parameters of a layer."""

    num: int
    l1: float  # l1, l2 and max_abs are over the finite elements
    l2: float
    max_abs: float
    zeros: int
    nan: int
    inf: int

    @classmethod
    def from_statistics(cls, stats: FastStatistics) -> GradientSize:
        return cls(stats.num, stats.l1, stats.l2, stats.max_abs if stats.num_finite else 0.0, stats.zeros, stats.nan, stats.inf)

    @property
    def is_finite(self) -> bool:
        return not (self.nan or self.inf)

    @property
    def is_zero(self) -> bool:
        """All elements are exactly zero, and there is at least one."""
        return self.num > 0 and self.zeros == self.num

    def with_nonfinite(self, over_finite: float) -> float:
        """The value over all elements, as torch computes it: NaN or Infinity if the gradient contains them."""
        return math.nan if self.nan else math.inf if self.inf else over_finite

    @property
    def norm(self) -> float:
        return self.with_nonfinite(self.l2)

    @property
    def mean_abs(self) -> float:
        return self.with_nonfinite(self.l1 / self.num if self.num else 0.0)


def combine_sizes(sizes: Iterable[GradientSize]) -> GradientSize:
    """The size of several gradients taken as one vector."""
    parts = list(sizes)
    return GradientSize(
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
    """The gradient of one layer in one step. If the gradient contains NaN or Inf, so do these values."""

    name: str
    mean_abs_grad: float
    max_abs_grad: float
    grad_norm: float  # L2
    is_vanishing: bool
    is_exploding: bool
    flow_intensity: float  # norm over the largest finite norm of the frame, from 0 to 1; 1 if it is not finite

    @property
    def has_issue(self) -> bool:
        return self.is_vanishing or self.is_exploding


@dataclass(frozen=True, slots=True)
class GradientFrame:
    """The gradients of all layers in one step, sorted by layer name."""

    step: int
    layers: tuple[LayerGradient, ...]

    @property
    def has_issue(self) -> bool:
        return any(layer.has_issue for layer in self.layers)

    @property
    def total_norm(self) -> float:
        """The L2 norm of all layers together, which clip_grad_norm_ compares with its limit."""
        return math.hypot(*(layer.grad_norm for layer in self.layers))


def build_frame(step: int, sizes: Mapping[str, GradientSize], *, vanishing_threshold: float, exploding_threshold: float) -> GradientFrame:
    """Builds the frame of one step; layers are flagged by absolute thresholds."""
    largest = max((size.l2 for size in sizes.values() if math.isfinite(size.norm)), default=0.0)
    layers = []
    for name in sorted(sizes):
        size = sizes[name]
        norm, mean_abs = size.norm, size.mean_abs
        layers.append(
            LayerGradient(
                name=name,
                mean_abs_grad=mean_abs,
                max_abs_grad=size.with_nonfinite(size.max_abs),
                grad_norm=norm,
                is_vanishing=mean_abs < vanishing_threshold,
                is_exploding=not size.is_finite or size.max_abs > exploding_threshold,
                flow_intensity=(norm / largest if largest > 0 else 0.0) if math.isfinite(norm) else 1.0,
            )
        )
    return GradientFrame(step, tuple(layers))
