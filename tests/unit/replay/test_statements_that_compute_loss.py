"""A step is replayed although the function that called backward has returned before the optimizer checks the gradients."""

import gc
import weakref

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
from torch import nn  # noqa: E402

import sonde  # noqa: E402
from sonde import Origin, Run  # noqa: E402


def batch():
    torch.manual_seed(3)
    x = torch.randn(8, 4)
    x[5] = 0
    return x


def lengths(out):
    return out.pow(2).sum(1).sqrt()


def compute_and_backward(model, x):
    length = lengths(model(x))
    loss = length.mean()
    loss.backward()
    value = loss.item()
    del length, loss
    return value


def only_backward(loss):
    loss.backward()


class Trainer:
    """A step in several methods, all of which have returned when the optimizer is called."""

    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.history = []

    def compute_loss(self, x):
        out = self.model(x)
        return out.pow(2).sum(1).sqrt().mean()

    def backward(self, loss):
        loss.backward()

    def training_step(self, x):
        loss = self.compute_loss(x)
        self.backward(loss)
        self.history.append(loss.item())

    def fit(self, x):
        self.optimizer.zero_grad()
        self.training_step(x)
        self.optimizer.step()


def found_in(path):
    (origin,) = [Origin.from_dict(event.data) for event in Run(path).events("origin")]
    assert not list(Run(path).events("origin_unknown"))
    return origin


def linear():
    return nn.Linear(4, 4, bias=False)


def test_a_helper_that_computed_the_loss_and_called_backward_is_replayed(tmp_path):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
        compute_and_backward(model, batch())
        optimizer.step()
    found = found_in(tmp_path / "run")
    assert (found.phase, found.operation, found.samples, found.how) == ("backward", "sqrt", (5,), "replayed")
    assert found.text == "return out.pow(2).sum(1).sqrt()"


def test_a_helper_that_takes_the_loss_as_an_argument_is_replayed_with_its_caller(tmp_path):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
        x = batch()
        loss = lengths(model(x)).mean()
        only_backward(loss)
        optimizer.step()
    found = found_in(tmp_path / "run")
    assert (found.phase, found.operation, found.samples, found.how) == ("backward", "sqrt", (5,), "replayed")


def test_a_trainer_whose_methods_have_returned_is_replayed(tmp_path):
    model = linear()
    trainer = Trainer(model)
    with sonde.watch(model, trainer.optimizer, to=tmp_path / "run", strict=True):
        trainer.fit(batch())
    found = found_in(tmp_path / "run")
    assert (found.phase, found.operation, found.samples, found.how) == ("backward", "sqrt", (5,), "replayed")
    assert found.text == "return out.pow(2).sum(1).sqrt().mean()"
    assert len(trainer.history) == 1


def test_an_optimizer_that_is_called_in_a_helper_does_not_hinder_the_replay(tmp_path):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
        x = batch()
        loss = lengths(model(x)).mean()
        loss.backward()
        update()
    found = found_in(tmp_path / "run")
    assert (found.operation, found.samples) == ("sqrt", (5,))


def test_variables_of_a_returned_function_are_released_at_the_update(tmp_path):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    references = []

    def step():
        x = torch.randn(8, 4)
        references.append(weakref.ref(x))
        model(x).mean().backward()

    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
        step()
        optimizer.step()
        assert references[0]() is None
        step()
        model(torch.randn(8, 4))  # accumulation continues: of the previous forward only the inputs are stored
        optimizer.step()
        gc.collect()
        assert references[1]() is None
