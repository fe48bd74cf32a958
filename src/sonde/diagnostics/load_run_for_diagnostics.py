"""Diagnostics of a run on disk: its steps as columns, its model as an architecture, the findings of the rules."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from sonde.diagnostics.anomalous_steps import AnomalyDetector
from sonde.diagnostics.health_score import RuleResults
from sonde.diagnostics.training_history import Curve, Floats, MetricsRecorder, TrainingColumns
from sonde.diagnostics.user_supplied_metrics import MIB, ModelArchitectureInfo
from sonde.events import Kind, ModelWatched
from sonde.report import diagnose
from sonde.report.run_summary import VALIDATION
from sonde.run_view import RunView, newest_views
from sonde.runlog.run_reader import Run


def read_run(run: Run | Path | str) -> tuple[TrainingColumns, ModelArchitectureInfo | None, RuleResults]:
    """The columns and the first model of the lowest rank (its newest attempt, as the rules judge it), and what the rules say."""
    source = run if isinstance(run, Run) else Run(run)
    view = next(iter(newest_views(source).values()), None)
    report = diagnose(source)
    results = RuleResults(report.findings, report.clear, tuple(one.rule for one in report.not_evaluated))
    if view is None:
        return replace(MetricsRecorder().columns(), is_recorded_by_hand=False), None, results
    return _columns(view, source.logged), _architecture(view), results


def _columns(view: RunView, logged: list[str]) -> TrainingColumns:
    accuracy = _first_logged(view, logged, lambda name: "acc" in name.lower() and not VALIDATION.search(name))
    validation = _first_logged(view, logged, lambda name: "loss" in name.lower() and bool(VALIDATION.search(name)))
    rows = np.flatnonzero(view.losses.has_loss)
    own_ms = view.steps["sonde_ms"]
    step_ms = (view.steps["step_ms"] - np.where(own_ms > 0, own_ms, 0.0))[rows]  # observed steps are not the training's slow ones
    steps, loss = view.step_numbers[rows], view.losses.value[rows]
    num_samples = _num_samples(view)[rows]
    with np.errstate(invalid="ignore", divide="ignore"):
        throughput = np.where(step_ms > 0, num_samples / step_ms * 1e3, np.nan)
        seconds = float(np.nansum(np.where(step_ms >= 0, step_ms, 0.0))) / 1e3
    memory_mb = np.where(np.isnan(view.steps["cuda_mb"]), view.steps["rss_mb"], view.steps["cuda_mb"])[rows]
    is_known = np.isfinite(throughput)
    anomalies = AnomalyDetector()
    for values in zip(*(column.tolist() for column in (steps, loss, throughput, _at_steps(accuracy, view)[rows], memory_mb))):
        anomalies.update(*values)
    return TrainingColumns(
        Curve(steps.astype(np.float64), loss), view.loss_trend, validation, Curve(steps[is_known].astype(np.float64), throughput[is_known]),
        np.empty(0), anomalies, num_steps=len(rows), num_samples=float(np.nansum(num_samples)), seconds=seconds, accuracy=accuracy,
    )  # fmt: skip


def _first_logged(view: RunView, logged: list[str], is_wanted: Callable[[str], bool]) -> Curve:
    name = next(filter(is_wanted, logged), None)
    steps, values = view.logged(name) if name is not None else (np.empty(0), np.empty(0))
    return Curve(steps.astype(np.float64), values)


def _at_steps(curve: Curve, view: RunView) -> Floats:
    """The values of a curve as a column of the view; of several values in one step the last."""
    column = np.full(view.num_steps, np.nan)
    if view.num_steps:
        rows = np.searchsorted(view.step_numbers, curve.steps).clip(max=view.num_steps - 1)
        is_complete = view.step_numbers[rows] == curve.steps
        column[rows[is_complete]] = curve.values[is_complete]
    return column


def _num_samples(view: RunView) -> Floats:
    """In each step: the size of the largest input, times the forwards. Batches are inspected in some steps; their size hardly changes."""
    inspected = np.zeros(view.num_steps)
    for block in view.blocks(Kind.BATCH):
        table = block[Kind.BATCH]
        if "size" in table.fields:
            inspected[block.rows] = table["size"][:, table.is_known].max(axis=1, initial=0.0)
    last = np.maximum.accumulate(np.where(inspected > 0, np.arange(view.num_steps), -1))
    forwards = view.steps["forwards"]
    return np.where(last >= 0, inspected[last], np.nan) * np.where(forwards > 1, forwards, 1.0)


def _architecture(view: RunView) -> ModelArchitectureInfo | None:
    model = next(iter(view.events(ModelWatched)), None)
    if model is None:
        return None
    sites = [site for site in view.sites.values() if site.model == model.model]
    parameters = [site for site in sites if site.kind == "parameter"]
    outputs = {site.path: site.type for site in sites if site.kind == "output" and site.type}
    num_bytes = sum(site.num_bytes for site in parameters)
    total = max(0, model.num_parameters)
    return ModelArchitectureInfo(
        total_parameters=total, trainable_parameters=min(max(0, model.num_trainable), total), name=model.class_name,
        model_size_mb=num_bytes / MIB if parameters else None,
        layer_count=len({site.module for site in parameters}) if parameters else None,
        layer_types=dict(Counter(outputs.values()).most_common()),
        width=max((site.shape[0] for site in parameters if len(site.shape) > 1), default=None),
    )  # fmt: skip
