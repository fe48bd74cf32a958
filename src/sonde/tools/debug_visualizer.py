"""Pictures of a training, written as files: distributions, gradient flow, heat maps, and whatever a plug-in draws.

Values may be torch tensors of any kind, arrays or lists. They are read once: what is drawn is kept, they are not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from sonde.errors import SondeError
from sonde.tools.layer_patterns import require_name
from sonde.views import plots
from sonde.views.file import file_name, write_new
from sonde.views.plots import FORMATS, Plot
from sonde.views.plots.dashboard import dashboard
from sonde.views.plots.plot import DPI, make_folder

GROUP = "sonde.plots"  # entry points: a callable that takes name= and the data by keyword, and gives a Plot
DASHBOARD = "dashboard.html"
MOST_SHOWN = 20  # pictures of a visualizer in a notebook: the newest
BUILT_IN: dict[str, Callable[..., Plot]] = {
    "distribution": plots.distribution,
    "gradient_flow": plots.gradient_flow,
    "layer_heatmap": plots.layer_heatmap,
    "heatmap": plots.heatmap,
    "histograms": plots.histograms,
}
log = logging.getLogger("sonde")


@dataclass(frozen=True, slots=True)
class VisualizationConfig:
    """Where pictures go and what they are: "png", "svg", "pdf", "html", or "json" ("data"), the numbers alone."""

    output_directory: str | Path = "sonde_plots"
    format: str = "png"
    dpi: int = DPI

    def __post_init__(self) -> None:
        chosen = str(self.format).lower().removeprefix(".")
        chosen = "json" if chosen == "data" else chosen
        if chosen not in FORMATS:
            raise SondeError(f"format={self.format!r} is no format of pictures. Use one of: {', '.join(FORMATS)} (or data).")
        if isinstance(self.dpi, bool) or not isinstance(self.dpi, int) or not 10 <= self.dpi <= 2400:
            raise SondeError(f"dpi={self.dpi!r}: give the dots per inch as a whole number from 10 to 2400, for example dpi={DPI}.")
        object.__setattr__(self, "format", chosen)


class DebugVisualizer:
    """Draws and writes pictures, remembers them by name, and puts them on one page.

    A picture of a name that was drawn before takes its place, and that of its file.
    """

    def __init__(self, config: VisualizationConfig | None = None) -> None:
        self.config = config or VisualizationConfig()
        self._plots: dict[str, Plot] = {}

    def plot_tensor_distribution(self, name: str, values: Any, bins: int = 64) -> Path:
        """How often which value occurs."""
        return self._keep(name, plots.distribution(values, name=name, bins=bins))

    def plot_gradient_flow(self, name: str, steps: Any, gradients: Mapping[str, Sequence[float]] | Sequence[float]) -> Path:
        """Gradient norms over the steps: those of one layer, or a mapping of layers."""
        return self._keep(name, plots.gradient_flow(steps, gradients, name=name))

    def plot_layer_heatmap(
        self, name: str, layers: Sequence[str], steps: Any, matrix: Any, *, label: str = "value", unit: str = ""
    ) -> Path:
        """One number per layer (rows) and step (columns)."""
        return self._keep(name, plots.layer_heatmap(layers, steps, matrix, name=name, label=label, unit=unit))

    def plot_weight_histogram(self, name: str, weights: Any, bins: int = 64) -> Path:
        """The distribution of each weight: of a module, or of a mapping from names to values."""
        if hasattr(weights, "named_parameters"):
            weights = dict(weights.named_parameters())
        if not isinstance(weights, Mapping):
            weights = {name: weights}
        return self._keep(name, plots.histograms(weights, name=name, bins=bins))

    def plot_activation_heatmap(self, name: str, activations: Any, *, units: int | None = None) -> Path:
        """Units by positions. `units` is the dimension of the units, for shapes that do not show it (`plots.units_by_positions`)."""
        matrix = plots.units_by_positions(activations, units)
        return self._keep(name, plots.heatmap(matrix, name=name, x_label="position", y_label="unit", label="activation"))

    def plot(self, kind: str, name: str, **data: Any) -> Path | None:
        """A picture by the name of its kind, from Sonde or from a plug-in. None where a plug-in failed: the log says how."""
        if kind in BUILT_IN:
            return self._keep(name, BUILT_IN[kind](name=name, **data))
        plugins = {point.name: point for point in entry_points(group=GROUP)}
        found = plugins[require_name(kind, [*BUILT_IN, *plugins], "kind of plot")]
        try:
            drawn = found.load()(name=name, **data)
            if not isinstance(drawn, Plot):
                raise TypeError(f"it gave a {type(drawn).__name__}, not a sonde Plot")
            return self._keep(name, drawn)
        except SondeError:
            raise  # a letter about the data, or about the file
        except Exception as error:  # somebody else's code: its failure is told, and costs one picture
            log.warning("sonde: the plug-in plot %r (%s) failed: %s: %s", kind, found.value, type(error).__name__, error)
            return None

    def get_plot_names(self) -> list[str]:
        """The names of the pictures drawn so far, in their order."""
        return list(self._plots)

    def get_plot(self, name: str) -> Plot:
        """A picture drawn before, to look at in a notebook or to save elsewhere."""
        return self._plots[require_name(name, self._plots, "plot")]

    def create_dashboard(self, names: Iterable[str] | None = None) -> Path:
        """One self-contained page with the pictures of these names, or with all."""
        wanted = self.get_plot_names() if names is None else [names] if isinstance(names, str) else names
        chosen = [self.get_plot(name) for name in wanted]
        path = Path(self.config.output_directory) / DASHBOARD
        page = dashboard(chosen)
        make_folder(path.parent)
        write_new(path, page, replace=True)
        return path

    def _repr_html_(self) -> str:
        return "".join(plot._repr_html_() for plot in list(self._plots.values())[-MOST_SHOWN:])

    def _keep(self, name: str, plot: Plot) -> Path:
        path = Path(self.config.output_directory) / file_name(name, self.config.format, reserved=(DASHBOARD,))
        written = plot.save(path, dpi=self.config.dpi)
        self._plots[name] = plot
        return written
