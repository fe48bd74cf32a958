"""Diagnostics of a model as text or HTML: the score and its parts, the training, the model, recommendations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sonde.formatting import listing, number, percent, si_number
from sonde.render.summaries.tables import hanging, html_table
from sonde.render.terminal.sparkline import sparkline

if TYPE_CHECKING:
    from sonde.diagnostics.diagnostics_report import DiagnosticsReport

WIDTH = 80
NAME, POINTS = 16, 13  # columns of the parts
MOST_ANOMALIES = 3  # of each kind


def diagnostics_text(report: DiagnosticsReport) -> str:
    parts = hanging("", _headline(report))
    for part in report.health.parts:
        parts += hanging(f"  {part.name:<{NAME}}{part.points:<{POINTS + 2}}", part.why)
    for title, rows in (("training", _training(report)), ("model", _model(report))):
        if rows:
            parts += ["", title]
            for name, text in rows:
                parts += hanging(f"  {name:<{NAME}}", text)
    if report.losses:
        parts.insert(0, sparkline([loss for _, loss in report.losses], WIDTH - 2) + "\n")
    if report.recommendations:
        parts += ["", "what to do"]
        for line in report.recommendations:
            parts += hanging("  - ", line)
    return "\n".join(parts)


def diagnostics_html(report: DiagnosticsReport) -> str:
    parts = [(part.name, part.points, part.why) for part in report.health.parts]
    facts = [(name, text) for rows in (_training(report), _model(report)) for name, text in rows]
    return html_table(("part", "points", "why"), parts, title=_headline(report)) + html_table(("", ""), facts, notes=report.recommendations)


def _headline(report: DiagnosticsReport) -> str:
    return f"health {report.health}" + (f", {report.health.ceiling_why}" if report.health.ceiling_why else "")


def _training(report: DiagnosticsReport) -> list[tuple[str, str]]:
    dynamics, found = report.dynamics, report.dynamics.convergence
    if not dynamics.num_steps:
        return [("", "nothing recorded: pass steps to record_performance(...), or a run to ModelDiagnostics.from_run(...)")]
    steps = f"{dynamics.num_steps:,} with a loss, {dynamics.first_step} to {dynamics.last_step}"
    rows = [("steps", steps), ("learning", f"{dynamics.learning}: {dynamics.why}")]
    if found is not None:
        half = f"; half of the rest in about {number(found.half_life_steps)} steps" if found.half_life_steps is not None else ""
        end = f", towards about {number(found.end)}" if found.end is not None else ""
        rows.append(("pace", f"{number(1000 * found.per_step)} per 1,000 steps{end}{half}"))
        forecast = f"none: {found.reason}"
        if (one := found.forecast) is not None:
            forecast = f"{number(one.loss)} at step {one.step}, between {number(one.low)} and {number(one.high)} nine times in ten"
        rows.append(("forecast", forecast))
    if dynamics.plateau is not None:
        rows.append(("plateau", f"since step {dynamics.plateau.since_step}, at {number(dynamics.plateau.level)}"))
    overfits = {None: "could not tell", True: "yes", False: "no"}[dynamics.overfitting.is_overfitting]
    rows.append(("overfitting", f"{overfits}: {dynamics.overfitting.reason}"))
    efficiency = dynamics.efficiency
    if efficiency.removed_share is not None and efficiency.removed_share > 0:
        costs = [f"{percent(efficiency.removed_share)} of the first loss removed"]
        if efficiency.per_thousand_samples is not None:
            costs.append(f"{percent(efficiency.per_thousand_samples)} per 1,000 samples")
        if efficiency.samples_per_second is not None:
            costs.append(f"{number(round(efficiency.samples_per_second, 1))} samples/s")
        rows.append(("efficiency", ", ".join(costs)))
    kinds: dict[str, list[str]] = {}
    for anomaly in dynamics.anomalies:
        kinds.setdefault(anomaly.kind, []).append(f"step {anomaly.step} ({anomaly.text})")
    for kind, places in kinds.items():
        rows.append(("anomalies" if kind == next(iter(kinds)) else "", f"{kind}: {listing(places, MOST_ANOMALIES)}"))
    return rows


def _model(report: DiagnosticsReport) -> list[tuple[str, str]]:
    one = report.architecture
    if one is None:
        return []
    trainable = f", {percent(one.trainable_share)} trainable" if one.trainable_share is not None else ""
    size = f", {number(one.model_size_mb)} MiB" if one.model_size_mb is not None else ""
    rows = [("parameters", f"{si_number(one.total_parameters)}{trainable}{size}" + (f" ({one.name})" if one.name else ""))]
    layers = [f"{num} {name}" for name, num in one.layer_types.items()]
    if one.layer_count is not None or layers:
        count = f"{one.layer_count} with parameters" if one.layer_count is not None else ""
        rows.append(("layers", "; ".join(part for part in (count, listing(layers, 6)) if part)))
    if one.depth is not None:
        rows.append(("depth", f"{one.depth} layers with weights, by {one.depth_known_by}" if one.depth_known_by else str(one.depth)))
    if one.receptive_field is not None:
        field = " x ".join(map(str, one.receptive_field))
        stride = f", {' x '.join(f'{step:g}' for step in one.receptive_stride)} apart" if one.receptive_stride else ""
        rows.append(("receptive field", f"{field}{stride}"))
    elif one.receptive_note:
        rows.append(("receptive field", one.receptive_note))
    if report.parameter_efficiency is not None and report.parameter_efficiency > 0:
        num, unit = (1.0, "million") if (one.trainable_parameters or 0) >= 1e5 else (1e3, "thousand")
        samples = f"; {number(report.samples_per_parameter)} samples per parameter" if report.samples_per_parameter is not None else ""
        share = number(100 * report.parameter_efficiency / num)
        rows.append(("per parameter", f"{share} % of the first loss removed per {unit} parameters{samples}"))
    return rows
