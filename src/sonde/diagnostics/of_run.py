"""Diagnostics of a run on disk: its steps as metrics, its model as an architecture, its rules' findings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sonde.diagnostics.data import MIB, ModelArchitectureInfo, ModelPerformanceMetrics
from sonde.diagnostics.dynamics import Dynamics
from sonde.events import Finding, Kind, Site, Step
from sonde.report import judge
from sonde.rules.learning import losses
from sonde.rules.told import VALIDATION
from sonde.runlog.reader import Run

# Of those that do not have four.
BYTES = {"float64": 8, "complex64": 8, "complex128": 16, "float16": 2, "bfloat16": 2, "int64": 8, "int8": 1, "uint8": 1, "bool": 1}


def read_run(run: Run | Path | str) -> tuple[Dynamics, ModelArchitectureInfo | None, tuple[Finding, ...]]:
    """What the steps of the lowest rank say, the first model, and what the rules found."""
    source = run if isinstance(run, Run) else Run(run)
    rank = next(iter(source.ranks), 0)
    fold = Dynamics()
    logged = {name: dict(zip(*(part.tolist() for part in source.series(Kind.LOG, name, "value", rank)))) for name in source.logged}
    right = next((values for name, values in logged.items() if "acc" in name.lower() and not VALIDATION.search(name)), {})
    batch_size = math.nan
    for step in source.steps(rank):
        batch_size = _batch_size(step, batch_size)
        found, bad = losses(step)
        if found or bad:
            fold.see(_metrics(step, math.nan if bad and not found else next(iter(found.values())), batch_size, right), step)
    for name, values in logged.items():
        if "loss" in name.lower() and VALIDATION.search(name):
            for number, loss in sorted(values.items()):
                fold.validated(int(number), loss)
            break
    return fold, _architecture(source, rank), judge(source).findings


def _batch_size(step: Step, last: float) -> float:
    """Of the largest input of a root model: batches are only looked at now and then, and their size hardly changes."""
    sizes = [row["size"] for _, row in step.table(Kind.BATCH) if row.get("size", 0.0) > 0]
    return max(sizes, default=last)


def _metrics(step: Step, loss: float, batch_size: float, right: Mapping[int, float]) -> ModelPerformanceMetrics:
    took, num = step.scalar("step_ms"), max(1.0, step.scalar("forwards", 1.0))
    samples = batch_size * num
    memory = step.scalar("cuda_mb")
    memory = memory if memory == memory else step.scalar("rss_mb")
    return ModelPerformanceMetrics(
        training_step=step.number, loss=loss, accuracy=right.get(step.number), learning_rate=_given(step.scalar("lr")),
        batch_size=_given(samples), throughput_samples_per_sec=_given(samples / took * 1e3) if took > 0 else None,
        memory_usage_mb=_given(memory), gradient_norm=_given(step.scalar("grad_norm")), step_time_ms=_given(took) if took >= 0 else None,
    )  # fmt: skip


def _given(value: float) -> Any:
    return value if value == value else None


def _architecture(run: Run, rank: int) -> ModelArchitectureInfo | None:
    model = next((event.data for event in run.events("model", rank)), None)
    if model is None:
        return None
    name = str(model.get("model", ""))
    sites = [site for site in run.sites.values() if site.model == name]
    parameters = [site for site in sites if site.kind == "parameter"]
    outputs = {site.path: site.type for site in sites if site.kind == "output" and site.type}
    total, trainable = _count(model.get("num_parameters")), _count(model.get("num_trainable"))
    return ModelArchitectureInfo(
        total_parameters=total or 0, trainable_parameters=min(trainable, total or 0) if trainable is not None else None,
        model_size_mb=sum(map(_num_bytes, parameters)) / MIB if parameters else None,
        layer_count=len({site.module for site in parameters}) if parameters else None,
        layer_types=dict(Counter(outputs.values()).most_common()),
        width=max((site.shape[0] for site in parameters if len(site.shape) > 1), default=None),
        name=str(model.get("class", "")),
    )  # fmt: skip


def _num_bytes(site: Site) -> int:
    return math.prod(site.shape) * BYTES.get(site.dtype.removeprefix("torch."), 4)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
