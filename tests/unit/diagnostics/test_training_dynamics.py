"""How a training goes, from its numbers alone: learning, plateau, overfitting, anomalies, the health score and what shows it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from sonde.diagnostics.diagnostics_report import DiagnosticsReport, build_diagnostics_report
from sonde.diagnostics.health_score import WEIGHTS, RuleResults
from sonde.diagnostics.load_run_for_diagnostics import read_run
from sonde.diagnostics.training_dynamics import TrainingDynamics, training_dynamics
from sonde.diagnostics.training_history import MAX_POINTS, MAX_STEPS, MetricsRecorder, TrainingColumns, thin
from sonde.diagnostics.user_supplied_metrics import ModelArchitectureInfo, ModelPerformanceMetrics
from sonde.errors import SondeError
from sonde.events import Finding, Severity
from sonde.rules.registry import RULES, SPEED_RULES


def columns_of(losses, **series) -> TrainingColumns:
    recorder = MetricsRecorder()
    for step, loss in enumerate(losses):
        more = {name: values[step] for name, values in series.items() if values[step] is not None}
        recorder.add(ModelPerformanceMetrics(training_step=step, loss=float(loss), **more))
    return recorder.columns()


def dynamics_of(losses, **series) -> TrainingDynamics:
    return training_dynamics(columns_of(losses, **series))


def report_of(losses, findings=None, architecture=None, **series) -> DiagnosticsReport:
    results = None if findings is None else RuleResults(tuple(findings), clear=("another-defect",))
    return build_diagnostics_report(columns_of(losses, **series), architecture, results)


def falling(num=120, seed=0, noise=0.05) -> np.ndarray:
    t = np.arange(num)
    return np.asarray((0.3 + 2 * np.exp(-t / 60)) * np.exp(noise * np.random.default_rng(seed).standard_normal(num)))


def level(num=120, at=2.3, seed=0, noise=0.05) -> np.ndarray:
    return np.asarray(at * np.exp(noise * np.random.default_rng(seed).standard_normal(num)))


# ---- does it learn?


@pytest.mark.parametrize(
    "losses, expected",
    [
        (falling(), "improving"),
        (level(), "not learning"),
        (np.exp(np.arange(60) / 15), "diverging"),
        ([*falling(40), *[math.nan] * 20], "not finite"),
        (np.r_[falling(120, noise=0.02), level(200, at=0.56, noise=0.02)], "settled"),
        (level(5), "could not tell"),
        ([], "could not tell"),
    ],
    ids=["falling", "level", "rising", "nan", "settled", "few", "none"],
)
def test_a_training_is_called_what_it_is(losses, expected):
    assert dynamics_of(losses).learning == expected


def test_a_plateau_begins_where_the_fall_ends():
    losses = np.r_[np.linspace(3, 1, 100), level(200, at=1.0, noise=0.02)]
    found = dynamics_of(losses).plateau
    assert found is not None
    assert 80 <= found.since_step <= 130
    assert found.level == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_still_falls_slowly_is_no_plateau(seed):
    t = np.arange(400)
    losses = (2.5 - 1.5 * t / 400) * np.exp(0.05 * np.random.default_rng(seed).standard_normal(400))
    assert dynamics_of(losses).plateau is None


def test_of_a_loss_that_is_gone_nothing_is_forecast():
    found = dynamics_of([*falling(80), *[math.nan] * 30]).convergence
    assert found is not None
    assert found.forecast is None
    assert "not finite" in found.reason


# ---- does it learn by heart?


def every_tenth(values) -> list[float | None]:
    return [value if not step % 10 else None for step, value in enumerate(values)]


def test_validation_that_rises_while_training_falls_is_overfitting():
    t = np.arange(200)
    found = dynamics_of(falling(200), validation_loss=every_tenth(0.5 + 1.5 * np.exp(-t / 25) + 0.004 * t)).overfitting
    assert found.is_overfitting is True
    assert 50 <= found.best_step <= 110
    assert found.last > found.best


@pytest.mark.parametrize("seed", range(5))
def test_validation_that_falls_with_noise_is_no_overfitting(seed):
    noise = np.exp(0.1 * np.random.default_rng(seed).standard_normal(200))
    found = dynamics_of(falling(200), validation_loss=every_tenth((0.5 + 1.5 * np.exp(-np.arange(200) / 40)) * noise)).overfitting
    assert found.is_overfitting is False


def test_validation_that_rises_with_training_is_no_overfitting():
    t = np.arange(200)
    both = 0.5 + np.exp(-t / 20) + 0.01 * t  # the training itself goes wrong
    assert dynamics_of(both, validation_loss=every_tenth(both)).overfitting.is_overfitting is False


def test_without_validation_nothing_is_said_about_overfitting():
    found = dynamics_of(falling()).overfitting
    assert found.is_overfitting is None
    assert "no validation loss" in found.reason


# ---- anomalies and efficiency


def test_a_spike_and_a_bad_loss_are_named_with_their_steps():
    losses = falling(150)
    losses[100], losses[120] = 60.0, math.inf
    found = {one.kind: one.step for one in dynamics_of(losses).anomalies}
    assert found == {"loss spike": 100, "loss not finite": 120}


def test_noise_alone_is_no_anomaly():
    assert dynamics_of(falling(400, noise=0.3)).anomalies == ()


def test_a_drop_of_throughput_and_memory_that_grows_are_anomalies():
    rates = [1000.0 + step % 7 for step in range(120)]
    rates[90] = 200.0
    memory = [500.0 + 3.0 * step for step in range(120)]
    found = {one.kind: one.step for one in dynamics_of(falling(), throughput_samples_per_sec=rates, memory_usage_mb=memory).anomalies}
    assert found["throughput drop"] == 90
    assert "memory growth" in found


def test_efficiency_is_what_was_learnt_by_what_it_took():
    found = dynamics_of(np.linspace(2, 1, 100), batch_size=[10] * 100, step_time_ms=[600.0] * 100).efficiency
    assert found.num_samples == 1000
    assert found.removed_share == pytest.approx(0.45, abs=0.1)  # by the medians of the first three and the last 25
    assert found.per_thousand_samples == pytest.approx(found.removed_share)
    assert found.per_minute == pytest.approx(found.removed_share)


def test_memory_is_bounded_and_a_bad_loss_is_kept():
    num = 2 * MAX_STEPS + 1000
    columns = columns_of((1.0 if step != 778 else math.nan for step in range(num)), batch_size=[2] * num)
    assert len(columns.loss.steps) <= 2 * MAX_STEPS
    assert (columns.num_steps, columns.num_samples) == (num, 2 * num)
    assert columns.loss.steps[:3].tolist() == [0, 1, 2]
    assert 778 in columns.loss.steps
    assert len(columns.loss.points()) <= MAX_POINTS
    assert 778 in dict(columns.loss.points())


@pytest.mark.parametrize("num", [0, 1, 100, 101, 250, 1000])
@pytest.mark.parametrize("bad_share", [0.0, 0.01, 0.5, 1.0])
def test_a_curve_is_thinned_to_the_limit_and_keeps_its_order(num, bad_share):
    values = np.where(np.random.default_rng(0).random(num) < bad_share, math.inf, 1.0)
    chosen = thin(values, 100)
    assert len(chosen) == num if num <= 100 else 25 <= len(chosen) <= 100
    assert (np.diff(chosen) > 0).all()
    if bad_share <= 0.01:
        assert set(np.flatnonzero(values == math.inf).tolist()) <= set(chosen.tolist())


# ---- health


def finding(severity: Severity) -> Finding:
    return Finding("some-defect", severity, "", 0, "cause", "do this", {})


def test_the_parts_weigh_a_hundred_and_the_score_is_their_sum():
    assert sum(WEIGHTS.values()) == 100
    t = np.arange(200)
    health = report_of(falling(200), (), validation_loss=every_tenth(2 * np.exp(-t / 50)), throughput_samples_per_sec=[100.0] * 200).health
    assert all(part.share is not None for part in health.parts)
    assert health.score == pytest.approx(sum(part.weight * (part.share or 0) for part in health.parts))


def test_what_was_not_evaluated_weighs_nothing():
    health = report_of(falling()).health
    judged = [part for part in health.parts if part.share is not None]
    assert {part.name for part in health.parts} - {part.name for part in judged} == {"findings", "generalisation", "efficiency"}
    assert health.score == pytest.approx(100 * sum(p.weight * (p.share or 0) for p in judged) / sum(p.weight for p in judged))


def test_health_that_cannot_be_told_is_no_number():
    assert report_of([]).health_score is None
    assert report_of([1.0, 0.9], ()).health_score is None


def test_health_falls_from_learning_over_stuck_to_not_finite():
    scores = [report_of(losses).health_score for losses in (falling(), level(), [*falling(40), *[math.nan] * 20])]
    assert all(score is not None for score in scores)
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > 90 > 60 > scores[1] > scores[2]


@pytest.mark.parametrize("severity, most", [("warning", 85), ("error", 60), ("critical", 30)])
def test_a_proved_defect_sets_a_ceiling_even_where_the_loss_looks_good(severity, most):
    report = report_of(falling(), [finding(Severity(severity))])
    assert report.health_score <= most
    assert report.recommendations[0] == "some-defect: do this"


def test_what_only_costs_time_is_a_matter_of_efficiency():
    slow = Finding("input-bound", Severity.ERROR, "", 0, "cause", "do this", {})
    report = report_of(falling(), [slow])
    assert report.health_score > 85
    assert {part.name: part.share for part in report.health.parts}["efficiency"] < 0.5
    assert report.recommendations[0] == "input-bound: do this"


def test_the_rules_about_time_are_those_that_stand_on_times():
    pages = {rule.name: Path(str(sys.modules[rule.check.__module__].__file__)).read_text(encoding="utf-8") for rule in RULES}
    assert {name for name, page in pages.items() if "sonde.rules._shared.profiled_steps" in page} == SPEED_RULES


T = np.linspace(0, 1, 120)
HEALTHY = {"accuracy": 0.5 + 0.4 * T, "throughput_samples_per_sec": np.full(120, 1000.0), "memory_usage_mb": np.full(120, 500.0)}


@pytest.mark.parametrize(
    "name, values, advice",
    [
        ("accuracy", 0.9 - 0.5 * T, "accuracy was 0.89"),
        ("accuracy", np.where(T < 0.5, 0.9, 0.4), "accuracy was 0.9 until about step 5"),
        ("throughput_samples_per_sec", np.where(T < 0.4, 1000.0, 300.0), "throughput fell from 1000 to 300 samples per second since"),
        ("memory_usage_mb", 500 + 1500 * T, "memory grows with every step"),
    ],
    ids=["accuracy", "sudden accuracy", "throughput", "leak"],
)
def test_a_falling_accuracy_or_throughput_and_a_leak_cost_more_than_12_points_and_get_advice(name, values, advice):
    healthy, broken = report_of(falling(), **HEALTHY), report_of(falling(), **HEALTHY | {name: values})
    assert healthy.health_score - broken.health_score > 12
    assert any(advice in line for line in broken.recommendations)
    assert not any(advice in line for line in healthy.recommendations)


def test_several_of_them_cost_more_than_one():
    worse = {"accuracy": 0.9 - 0.5 * T, "throughput_samples_per_sec": 1000 - 700 * T, "memory_usage_mb": 500 + 1500 * T}
    scores = [report_of(falling(), **HEALTHY | dict(list(worse.items())[:num])).health_score for num in range(4)]
    assert scores == sorted(scores, reverse=True)
    assert scores[3] <= 40


def test_a_noisy_accuracy_that_does_not_fall_costs_nothing():
    noisy = np.random.default_rng(0).binomial(4, 0.7, 120) / 4  # batches of four samples
    assert dynamics_of(falling(), accuracy=noisy).accuracy_fall is None
    assert dynamics_of(falling(8), accuracy=[0.9, 0.4] * 4).accuracy_fall is None  # too few


def test_rules_that_were_not_evaluated_give_no_points_and_are_counted():
    columns = columns_of(falling())

    def findings_part(results):
        return {part.name: part for part in build_diagnostics_report(columns, None, results).health.parts}["findings"]

    none = findings_part(RuleResults(not_evaluated=("a", "b")))
    assert (none.share, none.why) == (None, "none of 2 rules could be evaluated")
    third = findings_part(RuleResults(clear=("a",), not_evaluated=("b", "c")))
    assert (third.share, third.weight) == (1.0, WEIGHTS["findings"] / 3)
    assert third.why == "1 rule found nothing wrong; 2 could not be evaluated and give no points"


# ---- from a run, and for people


def test_a_healthy_run_scores_higher_than_a_broken_one(healthy_run, broken_run):
    healthy, broken = (build_diagnostics_report(*read_run(run)) for run in (healthy_run, broken_run))
    assert healthy.health_score > 85 > 15 > broken.health_score
    assert healthy.architecture is not None
    assert healthy.architecture.total_parameters == 128
    assert broken.dynamics.learning == "not finite"


def test_the_columns_of_a_run_hold_its_losses_samples_and_times(sample_run):
    losses = falling(60).tolist()
    losses[30] = math.nan
    columns, _, _ = read_run(sample_run(losses=losses))
    assert columns.num_steps == 60
    assert np.array_equal(columns.loss.values, losses, equal_nan=True)
    assert columns.trend.num_nonfinite == 1
    assert columns.seconds == pytest.approx(0.594)  # without the time of Sonde, 0.1 ms of 10 ms
    assert columns.num_samples == 0  # no batch was inspected
    assert columns.anomalies.counts == {"loss not finite": 1}


def test_a_run_without_steps_has_empty_columns(sample_run):
    columns, _, _ = read_run(sample_run(losses=[]))
    report = build_diagnostics_report(columns, None, RuleResults())
    assert (report.dynamics.num_steps, report.dynamics.learning, report.losses) == (0, "could not tell", ())


def test_the_text_fits_a_terminal_and_obeys_nobody():
    info = ModelArchitectureInfo(total_parameters=10, trainable_parameters=10, name="\x1b[31mred", layer_types={"\x07": 1})
    text = report_of(falling(), [finding(Severity.WARNING)], info).summary()
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert "\x07" not in text


def test_the_json_is_strict_and_keeps_what_is_not_finite():
    document = json.loads(report_of([*falling(40), *[math.inf] * 20]).to_json(), parse_constant=lambda name: pytest.fail(name))
    assert "Infinity" in {one["value"] for one in document["dynamics"]["anomalies"]}


def test_the_page_of_a_notebook_has_the_parts_and_no_markup_of_the_user(healthy_run):
    info = ModelArchitectureInfo(total_parameters=1, name="<script>")
    page = report_of(falling(), None, info)._repr_html_()
    assert "generalisation" in page
    assert "<script>" not in page


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"training_step": -1, "loss": 1.0}, "training_step"),
        ({"training_step": 0, "loss": "low"}, "loss"),
        ({"training_step": 0, "loss": 1.0, "batch_size": -4}, "batch_size"),
        ({"training_step": 0, "loss": 1.0, "gpu_utilization": 250}, "gpu_utilization"),
    ],
    ids=["step", "loss", "batch", "gpu"],
)
def test_numbers_that_cannot_be_meant_are_refused_by_name(wrong, said):
    with pytest.raises(SondeError, match=said):
        ModelPerformanceMetrics(**wrong)


def test_a_percentage_of_a_gpu_is_a_share():
    assert ModelPerformanceMetrics(training_step=0, loss=1.0, gpu_utilization=85).gpu_utilization == pytest.approx(0.85)


def test_more_trainable_parameters_than_there_are_is_refused():
    with pytest.raises(SondeError, match="11"):
        ModelArchitectureInfo(total_parameters=10, trainable_parameters=11)


def test_a_leap_that_does_not_come_back_is_what_to_look_at():
    report = report_of(np.r_[falling(100), level(30, at=90.0)])
    assert report.dynamics.learning == "diverging"
    assert "step 100" in report.recommendations[0]
    climbing = report_of(np.exp(np.arange(60) / 15))
    assert "learning rate" in climbing.recommendations[0]


def test_a_second_task_whose_loss_begins_higher_and_falls_is_learnt():
    found = dynamics_of(np.r_[0.1 * falling(100), falling(200)])
    assert found.learning == "improving"
    assert "since step 10" in found.why
