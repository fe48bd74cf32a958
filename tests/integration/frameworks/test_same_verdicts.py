"""The same fault gets the same verdict, whoever runs the loop; and the same training without it gets none."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import sonde
from framework_trainings import FAULTS, WAYS
from sonde.events import Severity

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The run of a training, each trained once."""
    known = {}

    def run(way, fault):
        package, train = WAYS[way]
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'sonde[dev]'")
        if (way, fault) not in known:
            known[way, fault] = sonde.Run(train(fault, tmp_path_factory.mktemp("runs") / (fault or "sound")))
        return known[way, fault]

    return run


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_planted_fault_is_the_first_finding(way, fault, runs):
    report = sonde.diagnose(runs(way, fault))
    assert report.verdict == "problems"
    assert report.findings[0].rule == FAULTS[fault], report.summary()


@pytest.mark.parametrize("way", WAYS)
def test_the_sound_training_gets_no_finding(way, runs):
    report = sonde.diagnose(runs(way, ""))
    assert not [finding for finding in report.findings if finding.severity.rank >= Severity.WARNING.rank], report.summary()
    assert report.verdict == "healthy"


@pytest.mark.parametrize("way", ["lightning", "accelerate"])
def test_the_same_training_has_the_same_losses_as_by_hand(way, runs):
    losses = [[step.scalars["loss"] for step in runs(name, "").steps()] for name in ("by hand", way)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "by hand"])
def test_every_run_says_that_its_gradients_are_those_that_the_optimizer_was_given(way, runs):
    (event,) = runs(way, "").events("integration")
    assert event.data["gradients"] == "as the optimizer is given them"
    assert (event.data["framework"], event.data["resumed_at"], event.data["rank"]) == (way, 0, 0)


def test_what_made_a_bad_loss_is_found_in_a_training_step_that_lightning_called(runs):
    (event,) = runs("lightning", "all-ignored").events("origin")
    assert event.data["how"] == "replayed"
    assert event.data["text"].startswith("return F.cross_entropy(")


def test_the_line_that_makes_the_optimizer_is_known_in_a_lightning_module(runs):
    (event,) = runs("lightning", "head-forgotten").events("optimizer")
    assert event.data["text"].startswith("return torch.optim.AdamW(held")
