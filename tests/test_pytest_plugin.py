"""The plugin for pytest: baselines are written when asked for, and a training that departs from its own fails its test."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

import warm
from sonde.pytest import SPEED
from sonde.rules import RULES

pytest_plugins = ["pytester"]

TEST = """
import pytest
torch = pytest.importorskip("torch")

def training(lr=0.1, clear=True, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    x = torch.randn(64, 8)
    y = x[:, :1] * 2 + 1

    def step():
        if clear:
            optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()

    return step, model, optimizer

def test_training(sonde_step):
    sonde_step(*training(CHANGE))
"""


OPTIONS = ("-p", "sonde.pytest", "-p", "no:cacheprovider", "--rootdir", ".")
# The plugin by its module, whether or not the installed Sonde has said its name to pytest.
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@pytest.fixture
def tests(tmp_path):
    """`tests("lr=0.2", "--sonde-update")` runs the test above with a change."""
    if not find_spec("torch"):
        pytest.skip("needs torch")

    def run(change="", *arguments, test=TEST):
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)  # a test that is changed within a second would not be read again
        (tmp_path / "test_it.py").write_text(test.replace("CHANGE", change), encoding="utf-8")
        return warm.python("-m", "pytest", *OPTIONS, *arguments, cwd=tmp_path, env=os.environ | ALONE)

    return run


def outcome(result, **expected):
    """What was printed, once the last line has counted as many as expected."""
    counted = re.findall(r"(\d+) (passed|failed|error|warning)", (result.stdout.splitlines() or [""])[-1])
    assert {word: int(num) for num, word in counted} == expected, result.stdout + result.stderr
    return result.stdout


def baseline_file(directory):
    [path] = (directory / "sonde_baselines").glob("*.json")
    return path


def test_importing_the_plugin_loads_neither_torch_nor_numpy():
    code = "import sys, sonde.pytest; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "rich"} & set(loaded)


def test_the_package_tells_pytest_of_the_plugin():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"sonde": "sonde.pytest"}


def test_what_is_left_out_as_a_matter_of_speed_are_rules():
    assert {rule.name for rule in RULES} >= SPEED


def test_the_options_stand_in_a_group_of_their_own(pytester, monkeypatch):
    monkeypatch.setenv(*next(iter(ALONE.items())))
    shown = pytester.runpytest_inprocess(*OPTIONS, "--help").stdout.str()
    assert "trainings and their baselines (Sonde):" in shown
    assert "--sonde-update" in shown


@pytest.mark.skipif(not entry_points(group="pytest11", name="sonde"), reason="installed before Sonde had a plugin")
def test_the_plugin_can_be_left_out(pytester):
    pytester.makepyfile("def test_it(sonde_step): pass")
    assert "fixture 'sonde_step' not found" in pytester.runpytest_inprocess("-p", "no:sonde").stdout.str()


@pytest.mark.torch
def test_without_a_baseline_a_test_fails_and_says_how_to_write_it(tests):
    shown = outcome(tests(), failed=1)
    assert "there is no baseline yet" in shown
    assert "pytest --sonde-update 'test_it.py::test_training'" in shown


@pytest.mark.torch
def test_a_baseline_is_written_when_asked_for_and_the_same_training_passes(tests, tmp_path):
    assert "baseline written" in outcome(tests("", "--sonde-update"), passed=1)
    assert json.loads(baseline_file(tmp_path).read_text())["format"] == "sonde-baseline"
    outcome(tests(), passed=1)


@pytest.mark.torch
def test_a_training_that_learns_more_slowly_fails_and_one_within_the_tolerance_passes(tests):
    tests("", "--sonde-update")
    shown = outcome(tests("lr=0.01"), failed=1)
    assert "error departs-from-baseline" in shown
    assert "Where this change is meant" in shown
    outcome(tests("lr=0.101"), passed=1)


@pytest.mark.torch
def test_a_sick_training_fails_by_its_own_findings_and_makes_no_baseline(tests, tmp_path):
    shown = outcome(tests("clear=False", "--sonde-update"), failed=1)
    assert "no baseline is made of a training that is not healthy" in shown
    assert "missing-zero-grad" in shown
    assert not (tmp_path / "sonde_baselines").exists()


@pytest.mark.torch
def test_an_error_of_the_training_is_the_error_of_the_test(tests):
    test = TEST.replace("sonde_step(*training(CHANGE))", "sonde_step(lambda: 1 / 0, *training()[1:])")
    assert "ZeroDivisionError" in outcome(tests(test=test), failed=1)


@pytest.mark.torch
def test_a_rule_can_be_ignored_by_its_name_and_a_wrong_name_is_told(tests):
    ignoring = TEST.replace("training(CHANGE))", "training(clear=False), ignore=['CHANGE'])")
    assert "there is no rule 'mising-zero-grad'" in outcome(tests("mising-zero-grad", test=ignoring), failed=1)


@pytest.mark.torch
def test_a_run_that_is_too_short_to_compare_fails(tests):
    tests("", "--sonde-update")
    shown = outcome(tests(test=TEST.replace("training(CHANGE))", "training(), steps=2)")), failed=1)
    assert "cannot be told" in shown


@pytest.mark.torch
def test_two_trainings_of_one_test_and_its_parameters_have_files_of_their_own(tests, tmp_path):
    test = TEST.split("def test_training")[0] + '''
@pytest.mark.parametrize("seed", [1, 2])
def test_training(sonde_baseline, seed):
    for name in ("first", "second"):
        step, model, optimizer = training(seed=seed)
        with sonde_baseline(model, optimizer, name=name):
            for _ in range(20):
                step()
'''
    outcome(tests("", "--sonde-update", test=test), passed=2)
    assert len(list((tmp_path / "sonde_baselines").iterdir())) == 4
    outcome(tests(test=test), passed=2)


@pytest.mark.torch
def test_baselines_can_be_kept_in_a_directory_of_the_users_choice(tests, tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nsonde_baselines = kept\n")
    outcome(tests("", "--sonde-update"), passed=1)
    assert len(list((tmp_path / "kept").glob("*.json"))) == 1


@pytest.mark.torch
def test_times_are_judged_when_asked_for_and_a_baseline_from_elsewhere_is_told(tests, tmp_path):
    tests("", "--sonde-update")
    path = baseline_file(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": "another"}))
    assert "another machine" not in outcome(tests(), passed=1)
    shown = tests("", "--sonde-times").stdout
    assert "sonde: times are not compared: the baseline was made on another machine" in shown
