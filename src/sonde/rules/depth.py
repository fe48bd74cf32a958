"""How the signal changes along the depth of the model: forward in the outputs, backward in their gradients.

The sites of a model's outputs are numbered in the order in which they ran first, so their order is the depth. A loop
over a cell unrolled by the program has one site per call and is deep in time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sonde.record import Frame, Kind, Step

if TYPE_CHECKING:
    from sonde.record import Floats

SHALLOWEST = 4  # sites: a model of fewer layers has no depth along which a signal could fade or grow
FLOOR = 1e-38  # below this float32 has no normal numbers: what is smaller is gone


@dataclass(frozen=True, slots=True)
class Profile:
    """One observed step. Ratios, so that the scale of the loss does not matter."""

    backward: float  # L2 norm of the gradient at the first layers over that at the last: small fades, large explodes
    forward: float  # L2 norm of the outputs of the last layers over that of the first
    steepest: float  # share of the backward change, in decades, that happens at one single place: near 1 it is a cliff, not a slope
    first: str  # path of the first layer
    last: str
    num_layers: int


def profile(step: Step) -> Profile | None:
    """None where the model is too shallow, was not observed, or holds non-finite numbers."""
    gradient = step.frames.get(Kind.ACTIVATION_GRADIENT)
    if gradient is None:
        return None
    sites, norms = _ordered(step, gradient)
    if len(sites) < SHALLOWEST:
        return None
    edge = max(1, len(norms) // 4)
    first, last = float(np.median(norms[:edge])), float(norms[-edge:].max())
    if not last > 0:
        return None
    logs = np.log10(np.maximum(norms / last, FLOOR))
    total = abs(float(logs[0] - logs[-1]))
    steepest = float(np.abs(np.diff(logs)).max()) / total if total > 0 else 0.0
    activation = step.frames.get(Kind.ACTIVATION)
    forward = 1.0
    if activation is not None:
        _, outputs = _ordered(step, activation)
        if len(outputs) >= SHALLOWEST and np.median(outputs[:edge]) > 0:
            forward = float(outputs[-edge:].max() / np.median(outputs[:edge]))
    return Profile(first / last, forward, steepest, step.sites[sites[0]].path, step.sites[sites[-1]].path, len(sites))


def _ordered(step: Step, frame: Frame) -> tuple[list[int], Floats]:
    """The sites of the model with the most of them, in order, with their norms; empty where something is not finite."""
    usable = (frame["num"] > 0) & (frame["nan"] == 0) & (frame["inf"] == 0)
    if not usable[frame["num"] > 0].all():
        return [], np.empty(0)
    models = [step.sites[i].model if i in step.sites else "" for i in frame.sites.tolist()]
    main = max(set(models), key=models.count, default="")
    keep = usable & np.array([model == main for model in models], dtype=bool)
    order = np.argsort(frame.sites[keep], kind="stable")
    return frame.sites[keep][order].tolist(), frame["l2"][keep][order]
