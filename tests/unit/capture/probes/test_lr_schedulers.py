"""What a run records of schedulers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import sonde

pytestmark = pytest.mark.torch


def parts():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(model, optimizer, x=None):
    optimizer.zero_grad()
    model(torch.randn(4, 3) if x is None else x).square().mean().backward()
    optimizer.step()


def events(session, kind):
    session.close()
    return [event.data for event in sonde.Run(session.run).events(kind)]


def loader(num=8, size=2):
    return DataLoader(TensorDataset(torch.randn(num, 3)), batch_size=size)


def test_a_scheduler_is_recorded_with_its_plan_when_it_is_constructed(tmp_path):
    model, optimizer = parts()
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        lr_scheduler.MultiStepLR(optimizer, milestones=[3, 5], gamma=0.5)
        update(model, optimizer)
    (one,) = events(session, "scheduler")
    assert (one["class"], one["plan"], one["rates"]) == ("MultiStepLR", {"milestones": [3, 5], "gamma": 0.5}, [0.1])
    assert one["source"].startswith("test_lr_schedulers.py:")
    assert events(session, "scheduler_begins") == []


def test_the_parts_of_a_sequence_are_known_as_such_and_its_first_step_is_recorded_once(tmp_path):
    model, optimizer = parts()
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        scheduler = lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, 4)], [2])
        for _ in range(4):
            update(model, optimizer)
            scheduler.step()
    assert [one["parts"] for one in events(session, "scheduler")] == [[], [], [0, 1]]
    (begun,) = events(session, "scheduler_begins")
    assert (begun["scheduler"], begun["before_optimizer"], begun["given"]) == (2, False, False)
    assert sum(step.scalars["scheduler_steps"] for step in sonde.Run(session.run).steps()) == 3


@pytest.mark.filterwarnings("ignore:Detected call")
def test_a_scheduler_that_steps_before_the_optimizer_is_known(tmp_path):
    model, optimizer = parts()
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(3):
            scheduler.step()
            update(model, optimizer)
    assert events(session, "scheduler_begins")[0]["before_optimizer"] is True


@pytest.mark.filterwarnings("ignore:Detected call")
def test_under_a_grad_scaler_that_skips_the_first_update_nothing_is_before_the_optimizer(tmp_path):
    model, optimizer = parts()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(100 * model(torch.ones(4, 3)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
    steps = list(sonde.Run(session.run).steps())
    assert steps[0].scalars["skipped_steps"] == 1
    assert events(session, "scheduler_begins")[0]["before_optimizer"] is False


def test_a_scheduler_that_was_constructed_before_the_session_is_recorded_with_its_first_step(tmp_path):
    model, optimizer = parts()
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    update(model, optimizer)
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        scheduler.step()
        update(model, optimizer)
    assert events(session, "scheduler")[0]["class"] == "ExponentialLR"
    assert events(session, "scheduler_begins")[0]["before_optimizer"] is False
    assert events(session, "optimizer")[0]["groups"][0]["initial_lr"] == 0.1


def test_a_rate_that_a_checkpoint_brings_along_is_that_of_no_scheduler(tmp_path):
    model, optimizer = parts()
    optimizer.param_groups[0].update(lr=1e-3, initial_lr=0.1)  # as `load_state_dict` does
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        update(model, optimizer)
    assert "initial_lr" not in events(session, "optimizer")[0]["groups"][0]


class Halving(lr_scheduler.LRScheduler):
    def get_lr(self):
        return [base * 0.5**self.last_epoch for base in self.base_lrs]

    def step(self, epoch=None):
        super().step()


def test_a_scheduler_of_ones_own_that_calls_torchs_step_is_not_taken_to_step_when_it_is_made(tmp_path):
    model, optimizer = parts()
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        scheduler = Halving(optimizer)
        for _ in range(3):
            update(model, optimizer)
            scheduler.step()
    assert [one["heard"] for one in events(session, "scheduler")] == [False]
    assert events(session, "scheduler_begins")[0]["before_optimizer"] is False
    assert [step.scalars["scheduler_steps"] for step in sonde.Run(session.run).steps()] == [0, 1, 1]


def test_a_scheduler_of_an_optimizer_that_is_not_watched_is_none_of_ours(tmp_path):
    model, optimizer = parts()
    _, other = parts()
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        lr_scheduler.ExponentialLR(other, 0.5)
        update(model, optimizer)
    assert events(session, "scheduler") == []
