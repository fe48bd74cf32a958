"""The gradients that a run has recorded: sizes by parameter in the observed steps, for the `GradientDebugger`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sonde.events import Frame, Kind, Site
from sonde.runlog.run_reader import Run
from sonde.tools.gradients.gradient_flow_analysis import GradientSize

Source = Run | Path | str

MEAN_OF_NORMAL = math.sqrt(2 / math.pi)  # mean of |x| over its root mean square, if x is normal around 0


@dataclass(frozen=True, slots=True)
class RecordedGradients:
    """Sizes by the path of a parameter. Gradients are those that the optimizer used: after clipping, unscaled."""

    steps: tuple[tuple[int, Mapping[str, GradientSize]], ...]  # the number of the step, sizes of the parameters that had a gradient
    weights: Mapping[str, GradientSize]  # at the first observed step
    paths: tuple[str, ...]  # of all trainable parameters, in the order of the model


def open_run(run: Source) -> Run:
    return run if isinstance(run, Run) else Run(run)


def read_gradients(run: Source, max_steps: int) -> RecordedGradients:
    """The last `max_steps` observed steps of the lowest rank."""
    source = open_run(run)
    frames = deque(source.frames(Kind.GRADIENT), maxlen=max_steps)
    first_weights = next(source.frames(Kind.PARAMETER), None)
    paths = tuple(dict.fromkeys(site.name for site in source.sites.values() if site.kind == "parameter" and site.trainable))
    steps = tuple((frame.step, _sizes(frame, source.sites)) for frame in frames)
    return RecordedGradients(steps, _sizes(first_weights, source.sites) if first_weights is not None else {}, paths)


def _sizes(frame: Frame, sites: Mapping[int, Site]) -> dict[str, GradientSize]:
    rows = zip(frame.sites.tolist(), *(frame[name].tolist() for name in ("num", "mean", "min", "max", "l2", "nan", "inf")))
    sizes: dict[str, GradientSize] = {}
    for site_id, num, mean, low, high, l2, nan, inf in rows:
        num_finite = num - nan - inf
        if num > 0 and site_id in sites:  # 0: the parameter had no gradient
            # A run has no L1 norm: it is estimated from what it has.
            l1 = max(abs(mean) * num_finite, MEAN_OF_NORMAL * l2 * math.sqrt(num_finite)) if num_finite > 0 else 0.0
            max_abs = max(abs(low), abs(high)) if num_finite > 0 else 0.0
            sizes[sites[site_id].name] = GradientSize(int(num), l1, l2 if num_finite > 0 else 0.0, max_abs, int(nan), int(inf))
    return sizes
