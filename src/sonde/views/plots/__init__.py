"""Pictures of numbers: arrays in, a `Plot` out. Nothing here imports torch, knows a run, or judges what it draws."""

from __future__ import annotations

from sonde.views.plots.distribution import distribution
from sonde.views.plots.flow import gradient_flow
from sonde.views.plots.heat import heatmap, layer_heatmap, units_by_positions
from sonde.views.plots.multiples import histograms
from sonde.views.plots.plot import FORMATS, Plot

__all__ = ["FORMATS", "Plot", "distribution", "gradient_flow", "heatmap", "histograms", "layer_heatmap", "units_by_positions"]
