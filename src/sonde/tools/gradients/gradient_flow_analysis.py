"""Gradient sizes per layer and step, and what follows from them: health classes, clipping advice, recommendations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median, quantiles

from sonde.formatting import counted, listing, number, printable
from sonde.render.summaries.tables import text_table
from sonde.rules.gradients.exploding_gradient import NUM_LEAPS, USUAL
from sonde.tools.tensors.describe_tensor import FastStatistics


@dataclass(frozen=True, slots=True)
class GradientSize:
    """Norms and counts of one gradient. `combine_sizes` adds up the parameters of a layer."""

    num: int
    l1: float  # l1, l2 and max_abs are over the finite elements
    l2: float
    max_abs: float
    nan: int
    inf: int

    @classmethod
    def from_statistics(cls, stats: FastStatistics) -> GradientSize:
        return cls(stats.num, stats.l1, stats.l2, stats.max_abs if stats.num_finite else 0.0, stats.nan, stats.inf)

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
        max_abs=max((p.max_abs for p in parts), default=0.0), nan=sum(p.nan for p in parts), inf=sum(p.inf for p in parts),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerGradientInfo:
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

    @property
    def issue(self) -> str:
        """ "not finite", "exploding", "vanishing" or ""."""
        if not math.isfinite(self.grad_norm):
            return "not finite"
        return "exploding" if self.is_exploding else "vanishing" if self.is_vanishing else ""

    def __str__(self) -> str:
        numbers = f"norm {number(self.grad_norm)}, mean {number(self.mean_abs_grad)}, largest {number(self.max_abs_grad)}"
        return printable(f"{self.name}: {numbers}" + (f" ({self.issue})" if self.issue else ""))


@dataclass(frozen=True, slots=True)
class GradientFrame:
    """The gradients of all layers in one step, sorted by layer name."""

    step: int
    layers: tuple[LayerGradientInfo, ...]

    @property
    def has_issue(self) -> bool:
        return any(layer.has_issue for layer in self.layers)

    @property
    def total_norm(self) -> float:
        """The L2 norm of all layers together, which clip_grad_norm_ compares with its limit."""
        return math.hypot(*(layer.grad_norm for layer in self.layers))

    def __str__(self) -> str:
        rows = [
            [layer.name, *map(number, (layer.grad_norm, layer.mean_abs_grad, layer.max_abs_grad)), layer.issue]
            for layer in self.layers[:MAX_ROWS]
        ]
        more = [f"and {counted(len(self.layers) - MAX_ROWS, 'more layer')}"] if len(self.layers) > MAX_ROWS else []
        head = f"step {self.step}: {counted(len(self.layers), 'layer')}, total norm {number(self.total_norm)}"
        return "\n".join([head, text_table(("layer", "norm", "mean", "largest", ""), rows), *more])


def build_frame(step: int, sizes: Mapping[str, GradientSize], vanishing_threshold: float, exploding_threshold: float) -> GradientFrame:
    """Builds the frame of one step; layers are flagged by absolute thresholds."""
    largest = max((size.l2 for size in sizes.values() if math.isfinite(size.norm)), default=0.0)
    layers = []
    for name, size in sorted(sizes.items()):
        norm, max_abs = size.norm, size.with_nonfinite(size.max_abs)
        vanishes, explodes = size.mean_abs < vanishing_threshold, not math.isfinite(max_abs) or max_abs > exploding_threshold
        intensity = (norm / largest if largest > 0 else 0.0) if math.isfinite(norm) else 1.0
        layers.append(LayerGradientInfo(name, size.mean_abs, max_abs, norm, vanishes, explodes, intensity))
    return GradientFrame(step, tuple(layers))


ENOUGH_NORMS = 10  # steps: fewer do not show which norms are usual
OUTLIER = 10.0  # times the median norm of the neighboring steps: batches differ by factors of two to ten
NUM_NEIGHBORS = USUAL // 2  # steps on either side; norms drift during training, so each is compared with its neighbors
USUAL_SHARE = 90  # percent of the usual steps that clipping leaves unchanged
COMMON_START = 1.0  # common default, used if the recorded norms give no better value
MAX_NAMES = 10  # layer names in one sentence
MAX_ROWS = 40  # of a printed table
FIND_ORIGIN = "To find the operation that creates them, run a step inside of: with sonde.find_origin(model) as search."
NOT_REMOVED = "clipping does not remove them"


class GradientHealth(StrEnum):
    """Health of the gradients of a training."""

    HEALTHY = "healthy"
    MINOR_ISSUES = "minor_issues"
    PROBLEMS_DETECTED = "problems_detected"
    CRITICAL = "critical"


def classify_health(frames: Sequence[GradientFrame], *, exploded: bool, vanished: bool) -> GradientHealth:
    """The health class, by the share of frames in which any layer has an issue."""
    issue_share = sum(frame.has_issue for frame in frames) / len(frames) if frames else 0.0
    if exploded and issue_share > 0.5:
        return GradientHealth.CRITICAL
    if exploded or issue_share > 0.3:
        return GradientHealth.PROBLEMS_DETECTED
    return GradientHealth.MINOR_ISSUES if vanished or issue_share > 0.1 else GradientHealth.HEALTHY


@dataclass(frozen=True, slots=True)
class ClippingAdvice:
    """Whether to clip gradients, at which norm, and why."""

    needed: bool | None  # None if it could not be determined
    max_norm: float | None  # for clip_grad_norm_; None if clipping would not help
    reason: str
    num_outliers: int = 0  # steps that clipping would change

    def __str__(self) -> str:
        if self.max_norm is not None:
            return f"clip at {number(self.max_norm)}: {self.reason}"
        return f"no clipping needed: {self.reason}" if self.needed is False else f"could not tell: {self.reason}"


def clipping_advice(frames: Sequence[GradientFrame]) -> ClippingAdvice:
    """Advises whether to clip the total norm, and at a value that usual steps rarely reach."""
    if not frames:
        return ClippingAdvice(None, None, "no gradients were recorded")
    known = [frame for frame in frames if math.isfinite(frame.total_norm)]
    if not known:
        return ClippingAdvice(None, None, f"NaN or Inf in each of {counted(len(frames), 'step')}: {NOT_REMOVED}")
    advice, num_bad = _advice_for_finite_norms(known), len(frames) - len(known)
    if num_bad:
        advice = replace(advice, reason=f"{advice.reason}; {counted(num_bad, 'step')} with NaN or Inf not counted: {NOT_REMOVED}")
    return advice


def _advice_for_finite_norms(frames: Sequence[GradientFrame]) -> ClippingAdvice:
    totals, steps = [frame.total_norm for frame in frames], counted(len(frames), "step")
    not_exploding = [frame.total_norm for frame in frames if not any(layer.is_exploding for layer in frame.layers)]
    if not not_exploding:
        return _advice_if_every_step_explodes(frames, totals)
    neighbors = (not_exploding[max(at - NUM_NEIGHBORS, 0) : at + NUM_NEIGHBORS + 1] for at in range(len(not_exploding)))
    usual = [norm for norm, near in zip(not_exploding, neighbors) if norm <= OUTLIER * median(near)]
    num_outliers = len(totals) - len(usual)
    if not num_outliers:
        if len(totals) < ENOUGH_NORMS:
            return ClippingAdvice(None, None, f"{steps} recorded, {ENOUGH_NORMS} are needed to know which norms are usual")
        why = f"{len(totals)} total norms, {number(min(totals))} to {number(max(totals))}, and none stands out from its neighbors"
        return ClippingAdvice(False, None, why)
    limit = _rounded(quantiles(usual, n=100, method="inclusive")[USUAL_SHARE - 1] if len(usual) > 1 else usual[0])
    others = f"of the others the median norm is {number(median(usual))} and {USUAL_SHARE} % are below {number(limit)}"
    if len(not_exploding) == len(totals) and num_outliers < NUM_LEAPS:  # one or two noisy batches are no reason to change a training
        outliers = f"{num_outliers} of {steps} had {OUTLIER:g} times the norm of the neighboring steps, clip if that happens again"
        return ClippingAdvice(False if len(totals) >= ENOUGH_NORMS else None, None, f"{outliers}; {others}", num_outliers)
    outliers = f"{num_outliers} of {steps} had an exploding gradient or {OUTLIER:g} times the norm of the neighboring steps"
    return ClippingAdvice(True, limit or COMMON_START, f"{outliers}; {others}", num_outliers)


def _advice_if_every_step_explodes(frames: Sequence[GradientFrame], finite: Sequence[float]) -> ClippingAdvice:
    rest = [math.hypot(*(layer.grad_norm for layer in frame.layers if not layer.is_exploding)) for frame in frames]
    limit = _rounded(median(rest))
    if limit > 0:
        why = f"every step explodes; {number(limit)} is the median norm of the layers that do not"
        return ClippingAdvice(True, limit, why, len(frames))
    why = f"every layer explodes in every step, with total norms from {number(min(finite))} on, so this is only a common default"
    return ClippingAdvice(True, COMMON_START, why, len(frames))


def recommendations(
    vanishing: Sequence[str], exploding: Sequence[str], nonfinite: Sequence[str], health: GradientHealth, clipping: ClippingAdvice
) -> list[str]:
    """Recommendations as sentences; the last one is for the health class. `exploding` are layers with finite gradients that are too large,
    `nonfinite` those with NaN or Inf."""
    lines = []
    if nonfinite:
        lines.append(f"NaN or Inf in the gradients of {listing(nonfinite, MAX_NAMES)}: {NOT_REMOVED}. {FIND_ORIGIN}")
    if vanishing:
        names, advice = listing(vanishing, MAX_NAMES), "add residual connections or normalization, or use a larger learning rate"
        lines.append(f"Vanishing gradients in {names}: {advice}.")
        lines.append("Check the initialization of these layers: Xavier for tanh and sigmoid, Kaiming for ReLU.")
    if exploding:
        call = clipping_call(clipping.max_norm or COMMON_START)
        lines.append(f"Exploding gradients in {listing(exploding, MAX_NAMES)}: clip them by norm, {call}; {clipping.reason}.")
        lines.append("Lower the learning rate, or use an optimizer that scales its steps, such as Adam.")
    return [*lines, _CLOSING[health]]


def clipping_call(max_norm: float) -> str:
    return f"torch.nn.utils.clip_grad_norm_(model.parameters(), {number(max_norm)})"


_CLOSING = {
    GradientHealth.CRITICAL: "Critical: halt the training and diagnose it before you continue.",
    GradientHealth.PROBLEMS_DETECTED: "Problems: review the depth of the model and the learning rate schedule.",
    GradientHealth.MINOR_ISSUES: "Minor issues: monitor these layers as the training continues.",
    GradientHealth.HEALTHY: "Healthy: no action needed.",
}


def _rounded(norm: float) -> float:
    """Rounded to two digits; more are not known."""
    return float(f"{norm:.2g}")
