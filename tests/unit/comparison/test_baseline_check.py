"""Baselines: what is kept of a run, and in what another run departs from it."""

import json
from dataclasses import replace

import numpy as np
import pytest

from comparison_runs import falling, write_pair_run
from sonde.comparison.baseline_check import RULE, check_against_baseline
from sonde.comparison.baseline_file import baseline_of, load, to_json
from sonde.errors import SondeError
from sonde.events import Severity

NUM = 200
STEADY = falling(NUM, 0.02)
WAVERING = [10 + 0.3 * np.sin(i) for i in range(NUM)]


def run(tmp_path, name, losses=STEADY, **rest):
    return write_pair_run(tmp_path / name, list(losses), **{"scalars": {"step_ms": WAVERING, "rss_mb": 900.0}} | rest)


def departures(path, baseline, **rest):
    return [finding for finding in check_against_baseline(path, baseline, **rest).findings if finding.rule == RULE]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return baseline_of([run(tmp_path_factory.mktemp("base"), "base")])


def test_a_run_does_not_depart_from_its_own_baseline(tmp_path, base):
    report = check_against_baseline(run(tmp_path, "same"), base)
    assert report.verdict == "healthy"
    assert RULE in report.clear


def test_the_step_at_which_the_loss_leaves_the_band_for_good_is_named(tmp_path, base):
    [found] = departures(run(tmp_path, "worse", [v * (1.5 if i >= 123 else 1) for i, v in enumerate(STEADY)]), base)
    assert (found.severity, found.step, found.evidence["side"]) == (Severity.ERROR, 123, "higher")
    assert "step 123" in found.cause


def test_a_loss_that_comes_back_into_the_band_is_no_departure(tmp_path, base):
    assert not departures(run(tmp_path, "bump", [v * (1.5 if 60 <= i < 100 else 1) for i, v in enumerate(STEADY)]), base)


def test_the_tolerance_is_what_a_loss_may_differ_by(tmp_path):
    flat = [1.0] * NUM
    base = baseline_of([run(tmp_path, "flat", flat)])
    path = run(tmp_path, "higher", [1.08] * NUM)
    assert not departures(path, base)
    assert departures(path, base, tolerance=0.05)


def test_two_losses_that_have_fallen_to_nearly_nothing_are_the_same(tmp_path):
    base = baseline_of([run(tmp_path, "one", [2.3 * 0.93**i + 0.004 for i in range(NUM)])])
    assert not departures(run(tmp_path, "other", [2.3 * 0.93**i + 0.006 for i in range(NUM)]), base)


def test_a_lower_loss_is_mentioned_and_is_no_problem(tmp_path, base):
    report = check_against_baseline(run(tmp_path, "better", [0.5 * loss for loss in STEADY]), base)
    assert report.verdict == "healthy"
    assert [(one.rule, one.severity) for one in report.findings] == [(RULE, Severity.INFO)]


def test_a_loss_that_is_no_longer_finite_departs_where_it_turns_bad(tmp_path, base):
    found = departures(run(tmp_path, "nan", [*STEADY[:150], *[float("nan")] * 50]), base)
    assert [(one.step, one.evidence["side"]) for one in found] == [(150, "not finite")]


def test_a_departure_of_a_broken_training_follows_from_what_is_wrong_with_it(tmp_path, base):
    broken = run(tmp_path, "broken", [3 * loss for loss in STEADY], scalars={"zero_grads": 0, "stale_updates": 1})
    report = check_against_baseline(broken, base, checks={"loss"})
    departed = next(one for one in report.findings if one.rule == RULE)
    assert report.findings[0].rule == departed.evidence["consequence_of"] == "missing-zero-grad"


def test_several_runs_make_a_band_as_wide_as_their_seeds(tmp_path):
    lower, higher = run(tmp_path, "lower"), run(tmp_path, "higher", [1.6 * loss for loss in STEADY])
    between = run(tmp_path, "between", [1.4 * loss for loss in STEADY])
    assert departures(between, baseline_of([lower]))
    assert not departures(between, baseline_of([lower, higher]))


def test_a_slower_step_is_told_with_the_phase_that_takes_the_time(tmp_path, base):
    slower = [13 + 0.3 * np.sin(i) for i in range(NUM)]
    [found] = departures(run(tmp_path, "slow", scalars={"step_ms": slower, "backward_ms": 8.0, "rss_mb": 900.0}), base)
    assert found.severity is Severity.WARNING
    assert "backward 5 to 8 ms" in found.cause
    assert found.evidence["ratio"] == pytest.approx(1.3, rel=0.02)


def test_a_time_within_what_the_machine_wavers_is_no_departure(tmp_path):
    restless = [10 + 4 * np.sin(i / 12) for i in range(NUM)]
    base = baseline_of([run(tmp_path, "restless", scalars={"step_ms": restless})])
    assert not departures(run(tmp_path, "again", scalars={"step_ms": [t * 1.15 for t in restless]}), base)


def test_times_of_another_machine_are_not_compared_and_it_is_said(tmp_path, base):
    path = run(tmp_path, "slow", scalars={"step_ms": 30.0, "rss_mb": 900.0})
    report = check_against_baseline(path, replace(base, machine="another"))
    assert report.verdict == "healthy"
    assert [one.reason for one in report.not_evaluated if one.rule == RULE] == [
        "times are not compared: the baseline was made on another machine"
    ]


def test_more_memory_is_a_departure_and_less_is_mentioned(tmp_path, base):
    more, less = (run(tmp_path, name, scalars={"step_ms": WAVERING, "rss_mb": mb}) for name, mb in (("more", 1200.0), ("less", 600.0)))
    assert [one.severity for one in departures(more, base)] == [Severity.WARNING]
    assert [one.severity for one in departures(less, base)] == [Severity.INFO]
    assert not departures(more, base, shared_process=True)


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_gradients_that_leave_their_band_are_told(tmp_path, base, factor):
    norms = [factor if i >= 100 else 1.0 for i in range(NUM)]
    [found] = departures(run(tmp_path, "gradients", scalars={"step_ms": WAVERING, "rss_mb": 900.0, "grad_norm": norms}), base)
    assert (found.evidence["what"], found.step, found.severity) == ("grad_norm", 100, Severity.WARNING)


def test_a_shorter_run_is_judged_as_far_as_it_goes(tmp_path, base):
    assert not departures(run(tmp_path, "short", STEADY[:70], scalars={"step_ms": 10.0, "rss_mb": 900.0}), base)
    assert departures(run(tmp_path, "bad", [2 * v for v in STEADY[:70]], scalars={"step_ms": 10.0, "rss_mb": 900.0}), base)


def test_a_run_without_a_step_in_common_cannot_be_told(tmp_path, base):
    report = check_against_baseline(run(tmp_path, "two", STEADY[:2], scalars={}), base, checks={"loss"})
    assert [one.reason for one in report.not_evaluated if one.rule == RULE] == ["the loss has next to no steps in common with the baseline"]
    assert RULE not in report.clear


def test_a_baseline_comes_back_from_its_file(tmp_path, base):
    path = tmp_path / "baseline.json"
    path.write_text(to_json(base))
    again = load(path)
    assert to_json(again) == to_json(base)
    assert (again.runs, again.num_steps, again.machine) == (base.runs, NUM, base.machine)
    assert again.curves["loss"][0].median == pytest.approx(base.curves["loss"][0].median, rel=1e-5)


def test_a_baseline_with_bad_numbers_is_strict_json(tmp_path):
    made = baseline_of([run(tmp_path, "nan", [*STEADY[:100], *[float("nan")] * 100])])
    path = tmp_path / "baseline.json"
    path.write_text(to_json(made))
    json.loads(path.read_text(), parse_constant=pytest.fail)
    assert np.isnan(load(path).curves["loss"][-1].median)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a baseline"),
        ('{"format": "sonde-profile", "schema": 1}', "is not a baseline"),
        ('{"format": "sonde-baseline", "schema": 99}', "reads up to 1"),
        ('{"format": "sonde-baseline", "schema": 1, "runs": []}', "is damaged"),
        ('{"format": "sonde-baseline", "schema": 1, "runs": [], "num_steps": 1, "machine": "", "threads": "", "torch": "", '
         '"curves": {"loss": [[0, 1]]}, "times_ms": {}, "memory_bytes": {}}', "is damaged"),
    ],
    ids=["cut", "list", "profile", "newer", "fields", "row"],
)  # fmt: skip
def test_what_is_no_baseline_is_refused_with_a_letter(tmp_path, text, told):
    path = tmp_path / "baseline.json"
    path.write_text(text)
    with pytest.raises(SondeError, match=told):
        load(path)


def test_a_run_without_a_step_has_no_envelope(tmp_path):
    with pytest.raises(SondeError, match="no complete step"):
        baseline_of([run(tmp_path, "empty", [], scalars={})])
