"""`sonde compare`: which runs are meant, what is printed or written, and the exit codes."""

import json

import pytest
from click.testing import CliRunner

from comparison_runs import falling, write_pair_run
from sonde.cli.compare import compare
from sonde.errors import SondeError

LOSSES = falling(60, 0.02)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Three runs in runs/, one after the other: base, same and worse."""
    monkeypatch.chdir(tmp_path)
    for place, (name, factor) in enumerate((("base", 1), ("same", 1), ("worse", 3))):
        path = write_pair_run(tmp_path / "runs" / name, [factor * loss for loss in LOSSES])
        info = json.loads((path / "run.json").read_text())
        (path / "run.json").write_text(json.dumps(info | {"started": 1000.0 + place}))
    return tmp_path


def call(*arguments):
    return CliRunner().invoke(compare, arguments)


def test_runs_are_named_by_path_or_by_name(runs):
    assert call("runs/base", "runs/same").exit_code == 0
    assert call("base", "worse").exit_code == 1
    assert call("base", "worse").stdout.startswith("≠ different   B's loss ends higher")


def test_one_run_is_compared_with_the_one_before_it(runs):
    document = json.loads(call("same", "--json").stdout)
    assert (document["a"]["run"], document["b"]["run"]) == ("base", "same")


def test_without_a_name_the_newest_is_compared_with_the_one_before_it(runs):
    document = json.loads(call("--json").stdout)
    assert (document["a"]["run"], document["b"]["run"]) == ("same", "worse")


def test_the_first_run_has_none_before_it(runs):
    result = call("base")
    assert isinstance(result.exception, SondeError)
    assert "no run before" in str(result.exception)


@pytest.mark.parametrize("suffix", ["html", "md", "json"])
def test_a_file_is_written_by_its_ending_and_never_over_another(runs, suffix):
    result = call("base", "worse", "-o", f"out.{suffix}")
    assert (result.exit_code, result.stdout) == (1, f"out.{suffix}\n")
    assert "ends higher" in (runs / f"out.{suffix}").read_text(encoding="utf-8")
    assert "exists already" in str(call("base", "worse", "-o", f"out.{suffix}").exception)
    assert call("base", "worse", "-o", f"out.{suffix}", "--force").exit_code == 1


def test_a_format_that_is_unknown_and_two_ways_at_once_are_refused(runs):
    assert "none of .html, .md, .json" in str(call("base", "worse", "-o", "out.pdf").exception)
    assert "give one of them" in str(call("base", "worse", "--json", "-o", "out.json").exception)


def test_it_works_as_a_command_and_says_in_a_letter_what_is_wrong(sonde, runs):
    child = sonde("compare", "base", "basement")
    assert (child.returncode, child.stdout) == (2, "")
    assert child.stderr.startswith("sonde: No run basement")
    assert "Nearest: base" in child.stderr
    assert sonde("compare", "base", "same").returncode == 0
