"""Plots of arrays and tensors: each function returns a `Plot`. Nothing here imports torch."""

from sonde.render.plots.heatmap_plot import activation_heatmap, heatmap, layer_heatmap, units_by_positions
from sonde.render.plots.histogram_plots import distribution, histograms
from sonde.render.plots.plot import FORMATS, Plot
from sonde.render.plots.step_curves import gradient_flow

__all__ = [
    "FORMATS", "Plot", "activation_heatmap", "distribution", "gradient_flow", "heatmap", "histograms", "layer_heatmap",
    "units_by_positions",
]  # fmt: skip
