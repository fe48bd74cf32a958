"""How the signal changes along the depth of the model: forward in the outputs, backward in their gradients.

The sites of a model's outputs are numbered in the order in which they ran first, so their order is the depth. A loop over
a cell unrolled by the program has one site per call and is deep in time. Stacked recurrent layers are one module with one
output; there the gradients of their biases tell, since the gradient of a bias is that of its layer's output, summed up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sonde.events import Frame, Kind, Step

if TYPE_CHECKING:
    from sonde.events import Floats

SHALLOWEST = 4  # sites: a model of fewer layers has no depth along which a signal could fade or grow
FLOOR = 1e-38  # below this float32 has no normal numbers: what is smaller is gone
RECURRENT = ("RNN", "LSTM", "GRU")


@dataclass(frozen=True, slots=True)
class DepthProfile:
    """One observed step. Ratios, so that the scale of the loss does not matter."""

    backward: float  # L2 norm of the gradient at the first layer over that at the last ones: small fades, large explodes
    forward: float  # size of the last layers' outputs, per number, over that of the first layer's; 1 where not known
    steepest: float  # share of the backward change, in decades, at one single place: near 1 it is a cliff, not a slope
    first: str  # path of the first layer
    last: str
    num_layers: int


def profile(step: Step, *, over_time: bool) -> DepthProfile | None:
    """None where the model is too shallow, was not observed, or holds non-finite numbers.

    With `over_time` each call of a module is a layer of its own, otherwise a module counts once, with its largest gradient: that the
    first of many time steps gets little of it is the nature of memory and no defect.
    """
    gradient = step.frames.get(Kind.ACTIVATION_GRADIENT)
    sites, norms = _ordered(step, gradient) if gradient is not None else ([], np.empty(0))
    if not over_time:
        sites, norms = _once_per_module(step, sites, norms)
    forward = 1.0
    if len(sites) >= SHALLOWEST:
        forward = _forward_growth(step)
    else:
        sites, norms = _recurrent_biases(step)
        if len(sites) < SHALLOWEST:
            return None
    last = float(norms[-max(1, len(norms) // 4) :].max())
    if not last > 0:
        return None
    logs = np.log10(np.maximum(norms / last, FLOOR))
    total = abs(float(logs[0] - logs[-1]))
    steepest = float(np.abs(np.diff(logs)).max()) / total if total > 0 else 0.0
    first_path, last_path = (step.sites[site].module for site in (sites[0], sites[-1]))
    return DepthProfile(float(norms[0]) / last, forward, steepest, first_path, last_path, len(sites))


def _once_per_module(step: Step, sites: list[int], norms: Floats) -> tuple[list[int], Floats]:
    place: dict[str, int] = {}
    first: list[int] = []
    largest: list[float] = []
    for site, norm in zip(sites, norms.tolist()):
        at = place.setdefault(step.sites[site].path, len(first))
        if at == len(first):
            first.append(site)
            largest.append(norm)
        largest[at] = max(largest[at], norm)
    return first, np.array(largest)


def _forward_growth(step: Step) -> float:
    activation = step.frames.get(Kind.ACTIVATION)
    if activation is None:
        return 1.0
    _, outputs = _ordered(step, activation, per_number=True)
    if len(outputs) < SHALLOWEST or not outputs[0] > 0:
        return 1.0
    return float(outputs[-max(1, len(outputs) // 4) :].max() / outputs[0])


def _recurrent_biases(step: Step) -> tuple[list[int], Floats]:
    """The biases of recurrent layers, in order, and after them the last bias of the model."""
    gradient = step.frames.get(Kind.GRADIENT)
    if gradient is None:
        return [], np.empty(0)
    sites, norms = _ordered(step, gradient)
    biases = [index for index, site in enumerate(sites) if is_bias(step, site)]
    keep = [index for index in biases if step.sites[sites[index]].type in RECURRENT]
    if not keep:
        return [], np.empty(0)
    keep += [index for index in biases[-1:] if index not in keep]
    return [sites[index] for index in keep], norms[keep]


def is_bias(step: Step, site: int) -> bool:
    return step.sites[site].path.rpartition(".")[2].startswith("bias")


def _ordered(step: Step, frame: Frame, *, per_number: bool = False) -> tuple[list[int], Floats]:
    """The sites of the model with the most of them, in order, with their norms; empty where something is not finite."""
    there = (frame["num"] > 0) & np.array([site in step.sites for site in frame.sites.tolist()], dtype=bool)
    if not ((frame["nan"] == 0) & (frame["inf"] == 0))[there].all():
        return [], np.empty(0)
    models = [step.sites[site].model if site in step.sites else "" for site in frame.sites.tolist()]
    main = max(dict.fromkeys(models), key=models.count, default="")
    keep = there & np.array([model == main for model in models], dtype=bool)
    norms = frame["l2"] / np.sqrt(np.maximum(frame["num"], 1)) if per_number else frame["l2"]
    order = np.argsort(frame.sites[keep], kind="stable")
    return frame.sites[keep][order].tolist(), norms[keep][order]
