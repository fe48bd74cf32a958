"""Pictures of a training beside its run, drawn when it ends: gradient norms over the steps, the weights it ended with, one page of both."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

import sonde
from sonde.events import Kind

if TYPE_CHECKING:
    from sonde.tools.debug_visualizer import DebugVisualizer

MAX_DRAWN = 12  # parameters: a picture with more lines shows none of them

_log = logging.getLogger("sonde")


def draw(visualizer: DebugVisualizer, run: Path, models: Mapping[str, nn.Module]) -> None:
    """The training is over: what goes wrong here costs the pictures and nothing else."""
    try:
        recorded = sonde.Run(run)
        names = [site.path for site in recorded.sites.values() if site.kind == "parameter" and site.trainable and not site.model]
        series = {name: recorded.series(Kind.GRADIENT, name, "l2") for name in names[:MAX_DRAWN]}
        longest = max((len(steps) for steps, _ in series.values()), default=0)
        drawn = {name: values.tolist() for name, (steps, values) in series.items() if len(steps) == longest}
        if longest:
            steps = next(steps for steps, _ in series.values() if len(steps) == longest)
            visualizer.plot_gradient_flow("gradient norms", steps.tolist(), drawn)
        for name, model in models.items():
            weights = {path: p.detach() for path, p in model.named_parameters() if p.dim() > 1}
            for path, weight in list(weights.items())[:MAX_DRAWN]:
                visualizer.plot_weight_histogram(f"weights of {name + '.' if name else ''}{path}", weight)
        if visualizer.get_plot_names():
            visualizer.create_dashboard()
    except Exception as error:
        _log.warning("sonde: no pictures could be drawn (%s: %s).", type(error).__name__, error)
