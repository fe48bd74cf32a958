"""What gradients say about a training: one set of health classes, one advice on clipping, one set of recommendations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median, quantiles

from sonde.rules.exploding_gradient import USUAL
from sonde.rules.words import listing, number
from sonde.tools.gradient_flow_frames import GradientFrame

ENOUGH_NORMS = 10  # steps: fewer do not show what is usual
OUTLIER = 10.0  # times the median norm around it: batches differ by factors of two to ten
NEIGHBOURS = USUAL // 2  # steps to either side; norms fall and rise over a training, so each is compared with those around it
USUAL_SHARE = 90  # percent of the usual steps that clipping leaves as they are
COMMON_START = 1.0  # what most recipes clip at, where nothing was observed that could say more
MAX_NAMES = 10  # in one sentence


class GradientHealth(StrEnum):
    HEALTHY = "healthy"
    MINOR_ISSUES = "minor_issues"
    PROBLEMS_DETECTED = "problems_detected"
    CRITICAL = "critical"


def health_of(*, exploded: bool, vanished: bool, issue_share: float) -> GradientHealth:
    """The class, from whether any layer ever exploded or vanished and the share of steps in which any layer has an issue."""
    if exploded and issue_share > 0.5:
        return GradientHealth.CRITICAL
    if exploded or issue_share > 0.3:
        return GradientHealth.PROBLEMS_DETECTED
    if vanished or issue_share > 0.1:
        return GradientHealth.MINOR_ISSUES
    return GradientHealth.HEALTHY


def issue_share(frames: Sequence[GradientFrame]) -> float:
    """Share of the frames in which any layer has an issue; 0 where there are none."""
    return sum(frame.has_issue for frame in frames) / len(frames) if frames else 0.0


@dataclass(frozen=True, slots=True)
class ClippingAdvice:
    """`needed` is None where it could not be told; `max_norm` is a number for clip_grad_norm_ wherever clipping would help."""

    needed: bool | None
    max_norm: float | None
    reason: str

    def __str__(self) -> str:
        if self.max_norm is not None:
            return f"clip at {number(self.max_norm)}: {self.reason}"
        return f"no clipping needed: {self.reason}" if self.needed is False else f"could not tell: {self.reason}"


def clipping_advice(frames: Sequence[GradientFrame]) -> ClippingAdvice:
    """Whether to clip the total norm, and at which number: one that the usual steps hardly reach."""
    totals = [frame.total_norm for frame in frames]
    finite = [total for total in totals if math.isfinite(total)]
    if not finite:
        if not frames:
            return ClippingAdvice(None, None, "no gradients were recorded")
        why = f"no total norm in {_steps(len(frames))} was finite, so {COMMON_START:g} is only a common start; find the cause first"
        return ClippingAdvice(True, COMMON_START, why)
    calm = [frame.total_norm for frame in frames if not any(layer.is_exploding for layer in frame.layers)]
    if not calm:
        return _where_every_step_explodes(frames, finite)
    usual = [norm for at, norm in enumerate(calm) if norm <= OUTLIER * median(calm[max(at - NEIGHBOURS, 0) : at + NEIGHBOURS + 1])]
    middle = median(usual)
    num_wild = len(totals) - len(usual)
    if not num_wild:
        if len(totals) < ENOUGH_NORMS:
            why = f"{_steps(len(totals))} recorded, {ENOUGH_NORMS} are needed to know which norms are usual"
            return ClippingAdvice(None, None, why)
        why = f"{len(totals)} total norms, {number(min(totals))} to {number(max(totals))}, and none stands out from its neighbours"
        return ClippingAdvice(False, None, why)
    limit = _rounded(quantiles(usual, n=100, method="inclusive")[USUAL_SHARE - 1] if len(usual) > 1 else usual[0])
    wild = f"{num_wild} of {_steps(len(totals))} had an exploding gradient or {OUTLIER:g} times the norm of the steps around it"
    others = f"of the others the median norm is {number(middle)} and {USUAL_SHARE} % are below {number(limit)}"
    return ClippingAdvice(True, limit or COMMON_START, f"{wild}; {others}")


def _where_every_step_explodes(frames: Sequence[GradientFrame], finite: Sequence[float]) -> ClippingAdvice:
    rest = [math.hypot(*(layer.grad_norm for layer in frame.layers if not layer.is_exploding)) for frame in frames]
    limit = _rounded(median(rest))
    if limit > 0:
        why = f"every step explodes; {number(limit)} is the median norm of the layers that do not"
    else:
        limit = COMMON_START
        why = f"every layer explodes in every step, with total norms from {number(min(finite))} on, so this is only a common start"
    return ClippingAdvice(True, limit, why)


def recommendations(
    vanishing: Sequence[str], exploding: Sequence[str], health: GradientHealth, clipping: ClippingAdvice
) -> tuple[str, ...]:
    """What to do, in sentences; the last one is for the class as a whole."""
    lines = []
    if vanishing:
        lines.append(
            f"Vanishing gradients in {listing(vanishing, MAX_NAMES)}: add residual connections or normalisation, "
            "or use a larger learning rate."
        )
        lines.append("Check the initialisation of these layers: Xavier for tanh and sigmoid, Kaiming for ReLU.")
    if exploding:
        limit = clipping.max_norm or COMMON_START
        lines.append(
            f"Exploding gradients in {listing(exploding, MAX_NAMES)}: clip them by norm, "
            f"torch.nn.utils.clip_grad_norm_(model.parameters(), {number(limit)}); {clipping.reason}."
        )
        lines.append("Lower the learning rate, or use an optimizer that scales its steps, such as Adam.")
    return (*lines, _CLOSING[health])


_CLOSING = {
    GradientHealth.CRITICAL: "Critical: halt the training and diagnose it before going on.",
    GradientHealth.PROBLEMS_DETECTED: "Problems: review the depth of the model and the learning rate schedule.",
    GradientHealth.MINOR_ISSUES: "Minor issues: monitor these layers as the training goes on.",
    GradientHealth.HEALTHY: "Healthy: no action needed.",
}


def _rounded(norm: float) -> float:
    """Two digits: nobody types more, and no more are known."""
    return float(f"{norm:.2g}")


def _steps(num: int) -> str:
    return f"{num} step" if num == 1 else f"{num} steps"
