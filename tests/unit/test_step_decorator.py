"""`@sonde.step` and `session.training_step`: one function or block that is a training step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sonde
from model_examples import BY_NAME

pytestmark = pytest.mark.torch


def parts():
    model = BY_NAME["mlp"].build()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def one(model, optimizer):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 6)).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def test_a_decorated_function_is_watched_from_its_first_call(tmp_path):
    model, optimizer = parts()

    @sonde.step(to=tmp_path / "run", every=1, strict=True)
    def train_step(scale):
        """Trains."""
        loss = one(model, optimizer)
        return {"loss": loss.detach(), "scaled": scale * loss.item(), "kept": None}

    assert train_step.__doc__ == "Trains."
    assert train_step.session.run is None
    losses = [train_step(2.0)["loss"].item() for _ in range(3)]
    assert train_step.session.stop().run.num_steps == 3
    run = sonde.Run(tmp_path / "run")
    assert [each.scalars["loss"] for each in run.steps()] == losses
    assert sorted({run.sites[i].path for frame in run.frames("log") for i in frame.sites.tolist()}) == ["logged/loss", "scaled"]


def test_without_settings_no_brackets_are_needed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, optimizer = parts()

    @sonde.step
    def train_step():
        return one(model, optimizer)

    assert isinstance(train_step(), torch.Tensor)
    train_step.session.close()
    assert len(list(sonde.Run(train_step.session.run).steps())) == 1


def test_a_step_that_fails_is_recorded_and_the_training_goes_on(tmp_path):
    model, optimizer = parts()
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True) as session:

        @session.training_step
        def train_step(fails=False):
            if fails:
                model(torch.randn(5, 7))
            return one(model, optimizer)

        train_step()
        with pytest.raises(RuntimeError):
            train_step(fails=True)
        train_step()
    run = sonde.Run(tmp_path / "run")
    (failed,) = run.events("step_failed")
    assert failed.step == 1
    assert failed.data["error"].startswith("RuntimeError: mat1 and mat2")
    assert [each.number for each in run.steps()] == [0, 1]


def test_a_block_is_a_step_as_often_as_it_is_entered(tmp_path):
    model, optimizer = parts()
    session = sonde.watch(model, optimizer, to=tmp_path / "run", strict=True)
    for _ in range(2):
        with session.training_step():
            one(model, optimizer)
    with pytest.raises(ZeroDivisionError), session.training_step():
        raise ZeroDivisionError
    session.close()
    assert [event.data["error"] for event in sonde.Run(tmp_path / "run").events("step_failed")] == ["ZeroDivisionError: "]


def test_parts_of_a_model_that_are_called_one_after_the_other_are_all_measured(tmp_path):
    """Nobody calls the model itself."""
    model = nn.ModuleDict({"encoder": nn.Linear(6, 4), "decoder": nn.Sequential(nn.ReLU(), nn.Linear(4, 6))})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @sonde.step(to=tmp_path / "run", every=1, strict=True)
    def train_step():
        x = torch.randn(5, 6)
        loss = (model["decoder"](model["encoder"](x)) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for _ in range(2):
        train_step()
    train_step.session.close()
    *_, last = sonde.Run(tmp_path / "run").steps()
    assert {site.path for site, _ in last.table("activation")} == {"encoder", "decoder.0", "decoder.1"}
