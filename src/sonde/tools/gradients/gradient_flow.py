"""Gradient sizes per layer and step, and what follows from them: health classes, clipping advice, recommendations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median, quantiles

from sonde.formatting import listing, number
from sonde.rules.gradients.exploding_gradient import USUAL
from sonde.tools.tensors.tensor_statistics import FastStatistics


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
        num=sum(part.num for part in parts), l1=math.fsum(part.l1 for part in parts), l2=math.hypot(*(part.l2 for part in parts)),
        max_abs=max((part.max_abs for part in parts), default=0.0), zeros=sum(part.zeros for part in parts),
        nan=sum(part.nan for part in parts), inf=sum(part.inf for part in parts),
    )  # fmt: skip


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
                name=name, mean_abs_grad=mean_abs, max_abs_grad=size.with_nonfinite(size.max_abs), grad_norm=norm,
                is_vanishing=mean_abs < vanishing_threshold, is_exploding=not size.is_finite or size.max_abs > exploding_threshold,
                flow_intensity=(norm / largest if largest > 0 else 0.0) if math.isfinite(norm) else 1.0,
            )
        )
    return GradientFrame(step, tuple(layers))


ENOUGH_NORMS = 10  # steps: fewer do not show which norms are usual
OUTLIER = 10.0  # times the median norm of the neighboring steps: batches differ by factors of two to ten
NUM_NEIGHBORS = USUAL // 2  # steps on either side; norms drift during training, so each is compared with its neighbors
USUAL_SHARE = 90  # percent of the usual steps that clipping leaves unchanged
COMMON_START = 1.0  # common default, used if the recorded norms give no better value
MAX_NAMES = 10  # layer names in one sentence


class GradientHealth(StrEnum):
    """Health of the gradients of a training."""

    HEALTHY = "healthy"
    MINOR_ISSUES = "minor_issues"
    PROBLEMS_DETECTED = "problems_detected"
    CRITICAL = "critical"


def classify_health(*, exploded: bool, vanished: bool, issue_share: float) -> GradientHealth:
    """The health class. `issue_share` is the share of steps in which any layer has an issue."""
    if exploded and issue_share > 0.5:
        return GradientHealth.CRITICAL
    if exploded or issue_share > 0.3:
        return GradientHealth.PROBLEMS_DETECTED
    if vanished or issue_share > 0.1:
        return GradientHealth.MINOR_ISSUES
    return GradientHealth.HEALTHY


def issue_share(frames: Sequence[GradientFrame]) -> float:
    """Share of the frames in which any layer has an issue; 0 without frames."""
    return sum(frame.has_issue for frame in frames) / len(frames) if frames else 0.0


@dataclass(frozen=True, slots=True)
class ClippingAdvice:
    """Whether to clip gradients, at which norm, and why."""

    needed: bool | None  # None if it could not be determined
    max_norm: float | None  # for clip_grad_norm_; None if clipping would not help
    reason: str

    def __str__(self) -> str:
        if self.max_norm is not None:
            return f"clip at {number(self.max_norm)}: {self.reason}"
        return f"no clipping needed: {self.reason}" if self.needed is False else f"could not tell: {self.reason}"


def clipping_advice(frames: Sequence[GradientFrame]) -> ClippingAdvice:
    """Advises whether to clip the total norm, and at a value that usual steps rarely reach."""
    totals = [frame.total_norm for frame in frames]
    finite = [total for total in totals if math.isfinite(total)]
    if not finite:
        if not frames:
            return ClippingAdvice(None, None, "no gradients were recorded")
        why = f"no total norm in {_steps(len(frames))} was finite, so {COMMON_START:g} is only a common default; find the cause first"
        return ClippingAdvice(True, COMMON_START, why)
    not_exploding = [frame.total_norm for frame in frames if not any(layer.is_exploding for layer in frame.layers)]
    if not not_exploding:
        return _advice_if_every_step_explodes(frames, finite)
    usual = [
        norm
        for at, norm in enumerate(not_exploding)
        if norm <= OUTLIER * median(not_exploding[max(at - NUM_NEIGHBORS, 0) : at + NUM_NEIGHBORS + 1])
    ]
    middle = median(usual)
    num_outliers = len(totals) - len(usual)
    if not num_outliers:
        if len(totals) < ENOUGH_NORMS:
            why = f"{_steps(len(totals))} recorded, {ENOUGH_NORMS} are needed to know which norms are usual"
            return ClippingAdvice(None, None, why)
        why = f"{len(totals)} total norms, {number(min(totals))} to {number(max(totals))}, and none stands out from its neighbors"
        return ClippingAdvice(False, None, why)
    limit = _rounded(quantiles(usual, n=100, method="inclusive")[USUAL_SHARE - 1] if len(usual) > 1 else usual[0])
    outliers = f"{num_outliers} of {_steps(len(totals))} had an exploding gradient or {OUTLIER:g} times the norm of the neighboring steps"
    others = f"of the others the median norm is {number(middle)} and {USUAL_SHARE} % are below {number(limit)}"
    return ClippingAdvice(True, limit or COMMON_START, f"{outliers}; {others}")


def _advice_if_every_step_explodes(frames: Sequence[GradientFrame], finite: Sequence[float]) -> ClippingAdvice:
    rest = [math.hypot(*(layer.grad_norm for layer in frame.layers if not layer.is_exploding)) for frame in frames]
    limit = _rounded(median(rest))
    if limit > 0:
        why = f"every step explodes; {number(limit)} is the median norm of the layers that do not"
    else:
        limit = COMMON_START
        why = f"every layer explodes in every step, with total norms from {number(min(finite))} on, so this is only a common default"
    return ClippingAdvice(True, limit, why)


def recommendations(
    vanishing: Sequence[str], exploding: Sequence[str], health: GradientHealth, clipping: ClippingAdvice
) -> tuple[str, ...]:
    """Recommendations as sentences; the last one is for the health class."""
    lines = []
    if vanishing:
        lines.append(
            f"Vanishing gradients in {listing(vanishing, MAX_NAMES)}: add residual connections or normalization, "
            "or use a larger learning rate."
        )
        lines.append("Check the initialization of these layers: Xavier for tanh and sigmoid, Kaiming for ReLU.")
    if exploding:
        limit = clipping.max_norm or COMMON_START
        lines.append(
            f"Exploding gradients in {listing(exploding, MAX_NAMES)}: clip them by norm, "
            f"torch.nn.utils.clip_grad_norm_(model.parameters(), {number(limit)}); {clipping.reason}."
        )
        lines.append("Lower the learning rate, or use an optimizer that scales its steps, such as Adam.")
    return (*lines, _CLOSING[health])


_CLOSING = {
    GradientHealth.CRITICAL: "Critical: halt the training and diagnose it before you continue.",
    GradientHealth.PROBLEMS_DETECTED: "Problems: review the depth of the model and the learning rate schedule.",
    GradientHealth.MINOR_ISSUES: "Minor issues: monitor these layers as the training continues.",
    GradientHealth.HEALTHY: "Healthy: no action needed.",
}


def _rounded(norm: float) -> float:
    """Rounded to two digits; more are not known."""
    return float(f"{norm:.2g}")


def _steps(num: int) -> str:
    return f"{num} step" if num == 1 else f"{num} steps"
