"""DebugVisualizer: plots of tensors, arrays and lists as files: distributions, gradient flow, heat maps, and plots of plug-ins."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from sonde.errors import SondeError
from sonde.layer_name_patterns import require_name
from sonde.render import plots
from sonde.render.plots import FORMATS, Plot
from sonde.render.plots.plot import DPI, plots_page
from sonde.render.safe_write import file_name, replace_file

GROUP = "sonde.plots"  # entry points: a callable that takes name= and the data by keyword, and returns a Plot
DASHBOARD = "dashboard.html"
MAX_SHOWN = 20  # plots shown in a notebook, the newest
BUILT_IN: dict[str, Callable[..., Plot]] = {
    "distribution": plots.distribution, "gradient_flow": plots.gradient_flow, "layer_heatmap": plots.layer_heatmap,
    "heatmap": plots.heatmap, "histograms": plots.histograms,
}  # fmt: skip
log = logging.getLogger("sonde")


@dataclass(frozen=True, slots=True)
class VisualizationConfig:
    """Output directory and file format: "png", "svg", "pdf", "html", or "json" (also "data") for the numbers alone."""

    output_directory: str | Path = "sonde_plots"
    format: str = "png"
    dpi: int = DPI

    def __post_init__(self) -> None:
        if not isinstance(self.output_directory, (str, Path)) or not str(self.output_directory):
            raise SondeError(f'output_directory={self.output_directory!r}: must be a path, for example output_directory="plots".')
        chosen = str(self.format).lower().removeprefix(".")
        chosen = "json" if chosen == "data" else chosen
        if chosen not in FORMATS:
            raise SondeError(f"format={self.format!r} is not a plot format. Use one of: {', '.join(FORMATS)} (or data).")
        if isinstance(self.dpi, bool) or not isinstance(self.dpi, int) or not 10 <= self.dpi <= 2400:
            raise SondeError(f"dpi={self.dpi!r}: must be a whole number from 10 to 2400, for example dpi={DPI}.")
        object.__setattr__(self, "format", chosen)


class DebugVisualizer:
    """Draws plots, writes them to files, stores them by name, and combines them on one page. A plot with an existing name replaces the
    earlier plot and its file."""

    def __init__(self, config: VisualizationConfig | str | Path | None = None) -> None:
        """`config` may also be the output directory alone."""
        if isinstance(config, (str, Path)):
            config = VisualizationConfig(output_directory=config)
        known: object = config
        if known is not None and not isinstance(known, VisualizationConfig):
            example = 'For example DebugVisualizer(VisualizationConfig(output_directory="plots")), or DebugVisualizer("plots").'
            raise SondeError(f"config must be a VisualizationConfig or a directory, not a {type(known).__name__}.\n{example}")
        self.config = config or VisualizationConfig()
        self._plots: dict[str, Plot] = {}

    def plot_tensor_distribution(self, name: str, values: Any, bins: int = 64) -> Path:
        """Writes a histogram of the values. Returns the path, as all plot methods do."""
        return self._save(name, plots.distribution(values, name=_plot_name(name), bins=bins))

    def plot_gradient_flow(self, name: str, steps: Any, gradients: Mapping[str, Sequence[float]] | Sequence[float]) -> Path:
        """Writes gradient norms over steps, of one layer or of a mapping from layers to norms."""
        return self._save(name, plots.gradient_flow(steps, gradients, name=_plot_name(name)))

    def plot_layer_heatmap(
        self, name: str, layers: Sequence[str], steps: Any, matrix: Any, *, label: str = "value", unit: str = ""
    ) -> Path:
        """Writes a heat map with one number per layer (rows) and step (columns)."""
        return self._save(name, plots.layer_heatmap(layers, steps, matrix, name=_plot_name(name), label=label, unit=unit))

    def plot_weight_histogram(self, name: str, weights: Any, bins: int = 64) -> Path:
        """Writes one histogram per parameter of a module, or per entry of a mapping from names to values."""
        if hasattr(weights, "named_parameters"):
            weights = dict(weights.named_parameters())
        by_name = weights if isinstance(weights, Mapping) else {name: weights}
        return self._save(name, plots.histograms(by_name, name=_plot_name(name), bins=bins))

    def plot_activation_heatmap(self, name: str, activations: Any, *, units: int | None = None) -> Path:
        """Writes a heat map of units by positions, or of square matrices as they are.

        `units` is the dimension of the units if the shape does not determine it."""
        return self._save(name, plots.activation_heatmap(activations, units=units, name=_plot_name(name)))

    def plot(self, kind: str, name: str, **data: Any) -> Path | None:
        """Writes a plot by the name of its kind, from Sonde or from a plug-in. Returns None if a plug-in failed; the log has the error."""
        if kind in BUILT_IN:
            return self._save(name, BUILT_IN[kind](name=_plot_name(name), **data))
        plugins = {point.name: point for point in entry_points(group=GROUP)}
        found = plugins[require_name(kind, [*BUILT_IN, *plugins], "kind of plot")]
        try:
            drawn = found.load()(name=_plot_name(name), **data)
            if not isinstance(drawn, Plot):
                raise TypeError(f"it returned a {type(drawn).__name__}, not a sonde Plot")
            return self._save(name, drawn)
        except SondeError:
            raise  # an error in the data or the file, with its own message
        except Exception as error:  # code of a third party: its failure is logged and costs one plot
            log.warning("sonde: the plug-in plot %r (%s) failed: %s: %s", kind, found.value, type(error).__name__, error)
            return None

    def get_plot_names(self) -> list[str]:
        """The names of all plots in the order of their creation."""
        return list(self._plots)

    def get_plot(self, name: str) -> Plot:
        """A stored plot, to show in a notebook or to save elsewhere."""
        return self._plots[require_name(name, self._plots, "plot")]

    def create_dashboard(self, names: Iterable[str] | None = None) -> Path:
        """Writes one self-contained HTML page with these plots, or with all. Returns the path."""
        if names is not None and not isinstance(names, Iterable):
            raise SondeError(f"names must be a list of plot names, for instance get_plot_names(), or None for all, not {names!r}.")
        wanted = self._plots if names is None else [names] if isinstance(names, str) else names
        page = plots_page([self.get_plot(name) for name in wanted])
        return replace_file(Path(self.config.output_directory) / DASHBOARD, page)

    def clear(self) -> None:
        """Forgets all plots. Their files stay."""
        self._plots.clear()

    def _repr_html_(self) -> str:
        return "".join(plot._repr_html_() for plot in list(self._plots.values())[-MAX_SHOWN:])

    def _save(self, name: str, plot: Plot) -> Path:
        path = Path(self.config.output_directory) / file_name(_plot_name(name), self.config.format, reserved=(DASHBOARD,))
        plot.save(path, dpi=self.config.dpi)
        self._plots[name] = plot
        return path


def _plot_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise SondeError(f'A plot needs a name such as "loss", not {name!r}: its file is named by it.')
    return name
