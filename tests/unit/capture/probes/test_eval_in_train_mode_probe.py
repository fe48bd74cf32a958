"""What is recorded of validations in training mode, on real trainings."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim.swa_utils import update_bn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import sonde  # noqa: E402
from sonde.report import diagnose  # noqa: E402
from sonde.runlog.run_reader import Run  # noqa: E402


@pytest.fixture
def data():
    torch.manual_seed(0)
    x = torch.randn(60, 6)
    return x, (x.sum(1) > 0).long()


class Training:
    """A small classifier under watch, with dropout and batch norm."""

    def __init__(self, run, data, **settings):
        self.run, (self.x, self.y), self.settings = run, data, {"every": 1} | settings
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = DataLoader(TensorDataset(self.x, self.y), batch_size=10)

    def __enter__(self):
        self.session = sonde.watch(self.model, self.optimizer, to=self.run, **self.settings).__enter__()
        return self

    def __exit__(self, *error):
        return self.session.__exit__(*error)

    def step(self, x, y):
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    def epoch(self):
        for x, y in self.loader:
            self.step(x, y)

    def events(self, kind):
        return [event.data for event in Run(self.run).events(kind)]


def validate(training, batches):
    with torch.no_grad():
        for x in batches:
            training.model(x)


def test_validation_in_training_mode_is_recorded_with_its_inputs(tmp_path, data):
    with Training(tmp_path / "run", data) as training:
        for _ in range(2):
            training.epoch()
            validate(training, training.x.split(20))
    first, last = training.events("evaluated_in_training")
    assert (first["at"], first["num_forwards"], first["num_inputs"], first["num_dropout"], first["num_batch_norm"]) == (6, 3, 3, 1, 1)
    assert (last["at"], last["num_pauses"], last["input"]) == (12, 2, first["input"])
    assert (first["line"].partition(":")[0], first["text"]) == ("test_eval_in_train_mode_probe.py", "training.model(x)")


def test_validation_in_eval_mode_and_models_that_are_not_trained_are_not_recorded(tmp_path, data):
    teacher = nn.Sequential(nn.Linear(6, 2), nn.Dropout(0.5))
    with Training(tmp_path / "run", data) as training:
        training.session.attach(teacher, name="teacher")
        training.epoch()
        with torch.no_grad():
            teacher(training.x)
        training.model.eval()
        validate(training, training.x.split(20))
    assert training.events("evaluated_in_training") == []


def test_parts_that_are_in_eval_mode_while_the_model_is_not_are_not_counted(tmp_path, data):
    with Training(tmp_path / "run", data) as training:
        training.epoch()
        training.model[1].eval()
        validate(training, training.x.split(20))
    (recorded,) = training.events("evaluated_in_training")
    assert (recorded["num_dropout"], recorded["num_batch_norm"]) == (1, 0)


def test_a_pause_of_the_training_is_recorded_once_though_watching_pauses_too(tmp_path, data):
    with Training(tmp_path / "run", data) as training:
        training.epoch()
        validate(training, training.x.split(20))
        with training.session.pause():
            validate(training, training.x.split(20))
    assert len(training.events("evaluated_in_training")) == 1


def test_repeated_samples_of_one_input_are_distinguished_from_a_dataset(tmp_path, data):
    with Training(tmp_path / "run", data) as training:
        training.epoch()
        validate(training, [training.x] * 10)
    (recorded,) = training.events("evaluated_in_training")
    assert (recorded["num_forwards"], recorded["num_inputs"]) == (10, 1)


def test_batch_statistics_that_are_computed_anew_are_distinguished_from_a_validation(tmp_path, data):
    with Training(tmp_path / "run", data) as training:
        training.epoch()
        update_bn(training.loader, training.model)
    (recorded,) = training.events("evaluated_in_training")
    assert recorded["cumulative"]
    assert "eval-in-train-mode" not in {finding.rule for finding in diagnose(training.run).findings}


def test_of_many_pauses_not_all_are_recorded(tmp_path, data):
    with Training(tmp_path / "run", data) as training:
        for _ in range(100):
            training.step(training.x[:10], training.y[:10])
            validate(training, [training.x])
    assert [recorded["num_pauses"] for recorded in training.events("evaluated_in_training")] == [*range(1, 17), 32, 64]
