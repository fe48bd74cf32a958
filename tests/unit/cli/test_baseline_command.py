"""`sonde baseline` and `sonde diagnose --against`: what is written, what is printed, and the exit codes."""

import json
import os

import pytest
from click.testing import CliRunner

from comparison_runs import falling, write_pair_run
from sonde.cli.baseline import baseline
from sonde.cli.diagnose import diagnose
from sonde.cli.explain import explain
from sonde.errors import SondeError

LOSSES = falling(120, 0.02)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, factor in (("base", 1), ("other", 1.02), ("worse", 3)):
        write_pair_run(tmp_path / "runs" / name, [factor * loss for loss in LOSSES])
    return tmp_path


def call(command, *arguments):
    return CliRunner().invoke(command, arguments)


def test_a_baseline_is_written_and_never_over_another(runs):
    first = call(baseline, "base", "other")
    assert (first.exit_code, first.stdout) == (0, "baseline.json: the envelope of 2 runs, 120 steps\n")
    assert json.loads((runs / "baseline.json").read_text())["runs"] == ["base", "other"]
    assert "exists already" in str(call(baseline, "base").exception)
    assert call(baseline, "base", "--force").exit_code == 0


def test_a_run_within_its_baseline_is_healthy_and_one_outside_is_not(runs):
    call(baseline, "base")
    assert call(diagnose, "other", "--against", "baseline.json").exit_code == 0
    worse = call(diagnose, "worse", "--against", "baseline.json")
    assert worse.exit_code == 1
    assert "departs-from-baseline" in worse.stdout
    assert call(diagnose, "worse").exit_code == 0  # nothing else is wrong with it


def test_the_tolerance_can_be_given_and_belongs_to_a_baseline(runs):
    call(baseline, "base")
    assert call(diagnose, "worse", "--against", "baseline.json", "--within", "5").exit_code == 0
    assert isinstance(call(diagnose, "worse", "--within", "0.1").exception, SondeError)


@pytest.mark.parametrize("within", ["-1", "nan"])
def test_a_tolerance_that_is_no_share_is_refused(runs, within):
    call(baseline, "base")
    assert isinstance(call(diagnose, "worse", "--against", "baseline.json", "--within", within).exception, SondeError)


def test_a_baseline_that_is_not_there_is_told_with_how_to_make_it(runs):
    assert "sonde baseline RUN -o nowhere.json" in str(call(diagnose, "base", "--against", "nowhere.json").exception)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 32)])
def test_a_pipe_or_a_huge_file_is_no_baseline(runs, make):
    make("odd.json")
    assert isinstance(call(diagnose, "base", "--against", "odd.json").exception, SondeError)


def test_a_baseline_of_a_broken_run_is_written_with_a_warning(runs):
    write_pair_run(runs / "runs" / "broken", LOSSES, scalars={"zero_grads": 0, "stale_updates": 1})
    made = call(baseline, "broken")
    assert made.exit_code == 0
    assert "broken has problems (missing-zero-grad)" in made.stderr


def test_the_rule_has_a_page(runs):
    assert "What it finds" in call(explain, "departs-from-baseline").stdout
    assert "departs-from-baseline" in call(explain).stdout
