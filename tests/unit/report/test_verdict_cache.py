"""verdict.json: a cache of the verdict beside the log, which counts only for the same logs, version and rules, and is not trusted."""

from __future__ import annotations

import json
import os

import pytest

import sonde.report.verdict_cache as cache
from sonde.report import diagnose
from sonde.report.verdict_cache import VERDICT_FILE, list_runs, read_verdict, summarize_report, write_verdict
from sonde.runlog.run_reader import Run


@pytest.fixture
def cached_run(broken_run):
    run = Run(broken_run)
    write_verdict(run, diagnose(run))
    return broken_run


def change(path, **fields):
    file = path / VERDICT_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_what_is_written_is_read(cached_run):
    found = read_verdict(cached_run)
    assert found == summarize_report(diagnose(cached_run))
    assert (found.verdict, found.rule, found.num_steps, found.last_loss) == ("problems", "missing-zero-grad", 70, "NaN")


def test_it_does_not_count_when_a_log_has_grown(cached_run):
    (log,) = cached_run.glob("*.sonde")
    with log.open("ab") as file:
        file.write(b"\0")
    assert read_verdict(cached_run) is None


@pytest.mark.parametrize("fields", [{"sonde": "0.0.1"}, {"rules": []}, {"logs": {}}, {"report": 7}, {"report": {"verdict": "healthy"}}])
def test_it_does_not_count_for_another_version_other_rules_or_a_damaged_report(cached_run, fields):
    change(cached_run, **fields)
    assert read_verdict(cached_run) is None


@pytest.mark.parametrize("field", ["rule", "where", "verdict", "num_steps", "last_loss"])
def test_a_field_of_another_type_makes_it_count_for_nothing(cached_run, field):
    report = json.loads((cached_run / VERDICT_FILE).read_text())["report"]
    change(cached_run, report=report | {field: ["x"]})
    assert read_verdict(cached_run) is None


@pytest.mark.parametrize("fields", [{"last_loss": "9" * 50_000}, {"num_steps": 10**4000}, {"num_steps": -5}])
def test_an_implausible_value_makes_it_count_for_nothing(cached_run, fields):
    report = json.loads((cached_run / VERDICT_FILE).read_text())["report"]
    change(cached_run, report=report | fields)
    assert read_verdict(cached_run) is None


@pytest.mark.parametrize("content", ["", "not json", "[1]", '{"mine": 1}'])
def test_a_file_of_somebody_else_is_ignored_and_stays(broken_run, content):
    (broken_run / VERDICT_FILE).write_text(content)
    run = Run(broken_run)
    write_verdict(run, diagnose(run))
    assert (broken_run / VERDICT_FILE).read_text() == content
    assert read_verdict(broken_run) is None


def test_a_link_is_neither_followed_nor_replaced(cached_run, tmp_path):
    outside = tmp_path / "outside.json"
    os.replace(cached_run / VERDICT_FILE, outside)
    before = outside.read_text()
    (cached_run / VERDICT_FILE).symlink_to(outside)
    assert read_verdict(cached_run) is None
    run = Run(cached_run)
    write_verdict(run, diagnose(run))
    assert (cached_run / VERDICT_FILE).is_symlink()
    assert outside.read_text() == before


def test_a_directory_that_cannot_be_written_is_no_error(broken_run, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    run = Run(broken_run)
    write_verdict(run, diagnose(run))
    assert sorted(path.suffix for path in broken_run.iterdir()) == [".json", ".sonde"]  # no temporary file stays


def test_a_running_run_is_not_cached(sample_run):
    run = Run(sample_run("running", [1.0] * 20, ending=None))  # by this process, which runs
    assert run.ended.how == "running"
    write_verdict(run, diagnose(run))
    assert not (run.path / VERDICT_FILE).exists()


def test_a_directory_that_is_dated_by_its_modification_time_is_left_as_it_is(broken_run):
    (broken_run / "run.json").unlink()
    run = Run(broken_run)
    write_verdict(run, diagnose(run))
    assert [path.suffix for path in broken_run.iterdir()] == [".sonde"]


def test_a_list_judges_what_is_not_cached_and_caches_it(broken_run, healthy_run):
    assert [each.verdict.verdict for each in list_runs([broken_run, healthy_run])] == ["problems", "healthy"]
    assert [each.verdict.verdict for each in list_runs([broken_run, healthy_run], time_limit_s=0)] == ["problems", "healthy"]


def test_a_run_that_does_not_fit_into_the_time_left_is_skipped_and_the_next_is_judged(broken_run, healthy_run, monkeypatch):
    monkeypatch.setattr(cache, "JUDGED_BYTES_PER_S", sum(log.stat().st_size for log in healthy_run.glob("*.sonde")))
    (log,) = broken_run.glob("*.sonde")
    with log.open("ab") as file:
        file.write(b"\0" * (1 << 20))
    large, small = list_runs([broken_run, healthy_run], time_limit_s=1.0, clock=lambda: 0.0)
    assert large.verdict is None
    assert small.verdict is not None


def test_no_run_is_begun_when_the_time_is_over(broken_run, healthy_run):
    times = iter([0.0, 1.0, 2.5])
    first, second = list_runs([healthy_run, broken_run], clock=lambda: next(times))
    assert first.verdict is not None
    assert second.verdict is None
