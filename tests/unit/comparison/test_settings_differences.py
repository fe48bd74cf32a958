"""Configuration, environment and layers: what differs, by name, and nothing else."""

import pytest

from comparison_runs import falling, write_pair_run
from sonde.comparison.settings_differences import compare_settings, compare_sites
from sonde.run_view import RunView
from sonde.runlog.run_reader import Run

LOSSES = falling(30)


@pytest.fixture
def runs(tmp_path):
    def write(a=None, b=None, losses_b=LOSSES):
        return Run(write_pair_run(tmp_path / "a", LOSSES, **(a or {}))), Run(write_pair_run(tmp_path / "b", losses_b, **(b or {})))

    return write


def differences(runs):
    found = compare_settings(runs, (RunView(runs[0].processes[0]), RunView(runs[1].processes[0])))
    return {one.name: (one.topic, one.a, one.b) for one in found}


def test_equal_runs_were_given_the_same(runs):
    assert differences(runs()) == {}


def test_arguments_are_compared_one_by_one(runs):
    a = ["train.py", "data", "--lr", "0.1", "--fast", "--name=x", "model.depth=3", "-v"]
    b = ["train.py", "other", "--lr", "-0.1", "--name=x", "--tag", "new", "model.depth=4", "-v"]
    assert differences(runs({"about": {"argv": a}}, {"about": {"argv": b}})) == {
        "argument 1": ("configuration", "data", "other"),
        "argument --lr": ("configuration", "0.1", "-0.1"),
        "argument --fast": ("configuration", "given", "–"),
        "argument model.depth": ("configuration", "3", "4"),
        "argument --tag": ("configuration", "–", "new"),
    }


def test_settings_under_other_settings_have_dotted_names(runs):
    a, b = ({"about": {"config": {"every": every, "log_weights": True}}} for every in (1, 5))
    found = differences(runs(a, b))
    assert found == {"config.every": ("configuration", "1", "5")}


def test_python_torch_threads_and_host_are_the_environment(runs):
    found = differences(runs(None, {"about": {"python": "3.12", "torch": "2.6.0", "threads": 8}}))
    assert {name: topic for name, (topic, _, _) in found.items()} == dict.fromkeys(("python", "torch", "threads"), "environment")


def test_learning_rates_are_compared_as_they_were_used(runs):
    rates = [0.1 if step < 20 else 0.01 for step in range(30)]
    found = differences(runs(None, {"scalars": {"lr": rates}}))
    assert found == {"lr": ("configuration", "0.1", "0.1 at first, 0.01 at step 29")}


def test_a_schedule_that_a_shorter_run_did_not_reach_is_no_difference(runs):
    rates = [0.1 if step < 20 else 0.01 for step in range(30)]
    assert differences(runs({"scalars": {"lr": rates}}, {"scalars": {"lr": 0.1}}, losses_b=LOSSES[:15])) == {}


def test_the_optimizer_and_what_the_loop_calls_are_compared(runs):
    found = differences(runs(None, {"optimizer": "AdamW", "scalars": {"zero_grads": 0.0}}))
    assert found == {"optimizer class": ("model", "SGD", "AdamW"), "zero grads per step": ("loop", "1", "0")}


def test_layers_of_one_run_alone_and_other_shapes_are_listed(runs):
    a, b = runs({"layers": ("encoder", "extra", "head")}, {"layers": ("encoder", "head", "more"), "shapes": {"head": (16, 8)}})
    found = compare_sites(RunView(a.processes[0]), RunView(b.processes[0]))
    assert (found.only_a, found.only_b) == (("extra.weight", "extra"), ("more.weight", "more"))
    assert found.num_shared == 4
    assert found.other_shapes == (("head.weight", (8, 8), (16, 8)),)


def test_runs_with_nothing_in_them_can_be_asked(runs):
    a, b = runs(None, None, losses_b=())
    assert compare_settings((a, b), (RunView(a.processes[0]), None))
