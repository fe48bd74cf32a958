"""Health classes of gradients, advice on clipping, and recommendations; shared by GradientDebugger and GradientFlowAnimator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median, quantiles

from sonde.rules.exploding_gradient import USUAL
from sonde.rules.words import listing, number
from sonde.tools.gradients.gradient_flow_frames import GradientFrame

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
