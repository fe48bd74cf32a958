"""The loss of a training with its forecast, beside the parts of its health score."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from sonde.render.plots import style
from sonde.render.plots.figure_with_panels import Panel, draw_panel
from sonde.render.plots.plot import Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sonde.diagnostics.diagnostics_report import DiagnosticsReport

NAME = "model diagnostics"


def diagnostics_plot(report: DiagnosticsReport) -> Plot:
    curves = {"training": report.losses, "validation": report.validation_losses}
    series = {name: ([step for step, _ in points], [loss for _, loss in points]) for name, points in curves.items() if points}
    panel = Panel("loss", "loss", series, [one.step for one in report.dynamics.anomalies if one.kind == "loss spike"], "spike")
    forecast = report.dynamics.convergence.forecast if report.dynamics.convergence is not None else None
    data = {
        "kind": "diagnostics", "losses": panel.data, "forecast": None if forecast is None else asdict(forecast),
        "health": report.health.score, "parts": {part.name: part.share for part in report.health.parts},
    }  # fmt: skip
    return Plot(NAME, lambda figure: _draw(figure, report, panel), data=data, size=(8.4, 3.4))


def _draw(figure: Figure, report: DiagnosticsReport, panel: Panel) -> None:
    dynamics = report.dynamics
    style.heading(figure, f"{NAME}: health {report.health}", f"{dynamics.learning}: {dynamics.why}" if dynamics.num_steps else "")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    forecast = dynamics.convergence.forecast if dynamics.convergence is not None else None
    also = [(forecast.step, forecast.low), (forecast.step, forecast.high)] if forecast is not None else []
    axes = draw_panel(left, panel, also=also)
    if axes is not None and forecast is not None:
        across, up = axes
        x = float(across.place(forecast.step))
        low, middle, high = up.place([forecast.low, forecast.loss, forecast.high]).tolist()
        # On a logarithmic axis an interval that reaches zero ends at the edge.
        low = low if low == low and low > -0.01 else -0.01
        left.plot([x, x], [low, high], color=style.PURPLE, linewidth=3, alpha=0.5, solid_capstyle="butt", label="forecast (90 %)")
        left.plot([x], [middle], marker="D", markersize=3.5, color=style.PURPLE, linestyle="none")
        left.legend(loc="best", frameon=False, fontsize=style.TINY)
    _parts(right, report)


def _parts(axes: Axes, report: DiagnosticsReport) -> None:
    parts = list(reversed(report.health.parts))
    axes.set_title("parts of the score", fontsize=style.SMALL, loc="left", color=style.TEXT, fontweight="bold")
    rows = range(len(parts))
    # A part that was not evaluated is an empty frame, different from a share of zero.
    colors = [style.BACKGROUND if part.share is None else style.GRID for part in parts]
    axes.barh(rows, [part.weight for part in parts], 0.62, color=colors, edgecolor=style.GRID, linewidth=1)
    axes.barh(rows, [part.weight * (part.share or 0.0) for part in parts], 0.62, color=style.BLUE, linewidth=0)
    for row, part in zip(rows, parts):
        axes.text(part.weight + 0.6, row, part.points.replace(" of ", "/"), va="center", fontsize=style.TINY, color=style.GRAY)
    axes.set_yticks(rows, labels=[part.name for part in parts])
    axes.set_xlim(0, 1.35 * max(part.weight for part in parts))
    axes.set_xlabel("points")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
