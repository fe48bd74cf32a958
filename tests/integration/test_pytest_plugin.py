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

import fork_server
from sonde.rules.registry import RULES, SPEED_RULES

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

"""


# The same tests before and after a change: what each of them trains, first for its baseline and then to be judged by it.
BEFORE = {
    "same": "training()", "slower": "training()", "near": "training()", "short": "training()", "broken": "training(clear=False)",
    "named": "training(), name='first'", "wrong": "training()",
}  # fmt: skip
AFTER = {
    "same": "training()", "slower": "training(lr=0.01)", "near": "training(lr=0.101)", "short": "training(), steps=2",
    "new": "training()", "error": "lambda: 1 / 0, *training()[1:]", "named": "training(), name='second'",
    "wrong": "training(), ignore=['mising-zero-grad']", "worse": "training(clear=False)",
}  # fmt: skip
OPTIONS = ("-p", "sonde.pytest_plugin", "-p", "no:cacheprovider", "--rootdir", ".", "-rA")
# The plugin by its module, whether or not the installed Sonde has said its name to pytest.
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def run_tests(directory, trainings, *arguments):
    """What pytest prints about one test per training."""
    shutil.rmtree(directory / "__pycache__", ignore_errors=True)  # a file that is changed within a second would not be read again
    bodies = [f"def test_{name}(sonde_step):\n    sonde_step({_starred(call)})\n" for name, call in trainings.items()]
    (directory / "test_it.py").write_text("\n".join([TEST, *bodies]), encoding="utf-8")
    return fork_server.python("-m", "pytest", *OPTIONS, *arguments, cwd=directory, env=os.environ | ALONE).stdout


def _starred(call):
    return f"*{call}" if call.startswith("training") else call


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """What was printed when the baselines were written, what when they were compared with, and where they are."""
    if not find_spec("torch"):
        pytest.skip("needs torch")
    directory = tmp_path_factory.mktemp("story")
    written = run_tests(directory, BEFORE, "--sonde-update")
    return written, run_tests(directory, AFTER), directory


def outcome(shown, name):
    """PASSED or FAILED."""
    return re.search(rf"^(\w+) test_it\.py::test_{name}\b", shown, re.MULTILINE)[1]


def told(shown, name):
    """Why a test failed."""
    return re.search(rf"^_+ test_{name} _+$(.*?)^(?:_+ test_|=+ )", shown, re.MULTILINE | re.DOTALL)[1]


def test_importing_the_plugin_loads_neither_torch_nor_numpy():
    code = "import sys, sonde.pytest_plugin; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "rich"} & set(loaded)


def test_the_package_tells_pytest_of_the_plugin():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"sonde": "sonde.pytest_plugin"}


def test_what_is_left_out_as_a_matter_of_speed_are_rules():
    assert {rule.name for rule in RULES} >= SPEED_RULES


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
def test_a_baseline_is_written_when_asked_for_and_the_same_training_passes(story):
    written, compared, directory = story
    path = directory / "sonde_baselines" / "test_it.test_same.json"
    assert f"sonde: baseline written: {path}" in written
    assert json.loads(path.read_text())["format"] == "sonde-baseline"
    assert outcome(written, "same") == outcome(compared, "same") == "PASSED"


@pytest.mark.torch
def test_without_a_baseline_a_test_fails_and_says_how_to_write_it(story):
    assert "there is no baseline yet" in told(story[1], "new")
    assert "pytest --sonde-update 'test_it.py::test_new'" in told(story[1], "new")


@pytest.mark.torch
def test_a_training_that_learns_more_slowly_fails_and_one_within_the_tolerance_passes(story):
    assert "error departs-from-baseline" in told(story[1], "slower")
    assert "If this change is intended" in told(story[1], "slower")
    assert outcome(story[1], "near") == "PASSED"


@pytest.mark.torch
def test_a_broken_training_makes_no_baseline(story):
    assert "a training that is not healthy cannot be a baseline" in told(story[0], "broken")
    assert "missing-zero-grad" in told(story[0], "broken")
    assert not (story[2] / "sonde_baselines" / "test_it.test_broken.json").exists()


@pytest.mark.torch
def test_an_error_of_the_training_is_the_error_of_the_test(story):
    assert "ZeroDivisionError" in told(story[1], "error")
    assert "sonde: " not in told(story[1], "error")


@pytest.mark.torch
def test_a_rule_to_ignore_that_does_not_exist_is_told(story):
    assert "there is no rule 'mising-zero-grad'" in told(story[1], "wrong")


@pytest.mark.torch
def test_a_run_that_is_too_short_to_compare_fails(story):
    assert "cannot be compared" in told(story[1], "short")


@pytest.mark.torch
def test_trainings_of_one_test_have_files_of_their_own_by_name(story):
    assert (story[2] / "sonde_baselines" / "test_it.test_named.first.json").exists()
    assert "test_it.test_named.second.json" in told(story[1], "named")


@pytest.mark.torch
def test_a_broken_training_fails_by_its_own_findings_unless_they_are_ignored(story, tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nsonde_baselines = kept\n")
    ignoring = {"worse": "training(clear=False), ignore=['missing-zero-grad']"}
    assert outcome(run_tests(tmp_path, ignoring, "--sonde-update"), "worse") == "PASSED"
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["test_it.test_worse.json"]  # where the user wants them
    assert "error missing-zero-grad" in told(run_tests(tmp_path, AFTER, "-k", "worse"), "worse")


@pytest.mark.torch
def test_times_are_judged_when_asked_for_and_a_baseline_from_elsewhere_is_told(story, tmp_path):
    kept = story[2] / "sonde_baselines" / "test_it.test_same.json"
    (tmp_path / "sonde_baselines").mkdir()
    (tmp_path / "sonde_baselines" / kept.name).write_text(json.dumps(json.loads(kept.read_text()) | {"machine": "another"}))
    note = "sonde: times are not compared: the baseline was made on another machine"
    assert note in run_tests(tmp_path, {"same": "training()"}, "--sonde-times")
    assert note not in story[1]
