"""Gradients that become non-finite after backward are traced to the statement that changes them, without side effects."""

import sys

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
from torch import nn  # noqa: E402

import sonde  # noqa: E402
from sonde import Origin, Run  # noqa: E402

NOTES = []


def normalize(parameters):
    for p in parameters:
        p.grad.div_(p.grad.norm())


def of_all(model):
    normalize(model.parameters())


def with_output(model):
    sys.stdout.write("normalizing")
    normalize(model.parameters())


def with_a_note(model):
    NOTES.append("normalized")
    normalize(model.parameters())


def scale(p):
    p.grad *= 1 / p.grad.abs().max()


def one_by_one(model):
    for p in model.parameters():
        scale(p)


def by_hand(model):
    gradients = [p.grad for p in model.parameters()]
    for g in gradients:
        g.div_(g.norm())


def assigned(model):
    for p in model.parameters():
        p.grad = p.grad / p.grad.norm()


def trained(tmp_path, change, *, steps=1):
    """Trains a model whose gradients are exactly 0; `change` changes them before the update."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
        for _ in range(steps):
            loss = (model(torch.randn(4, 3)) * 0).sum()
            optimizer.zero_grad()
            loss.backward()
            change(model)
            optimizer.step()
    return tmp_path / "run"


CHANGES = {
    "in a function": (of_all, "p.grad.div_(p.grad.norm())"),
    "through other names": (by_hand, "g.div_(g.norm())"),
    "by assignment": (assigned, "p.grad = p.grad / p.grad.norm()"),
    "one by one": (one_by_one, "p.grad *= 1 / p.grad.abs().max()"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_gradient_that_becomes_bad_after_backward_is_traced_to_the_line_that_changes_it(name, tmp_path):
    change, text = CHANGES[name]
    (event,) = Run(trained(tmp_path, change)).events("origin")
    found = Origin.from_dict(event.data)
    assert found.text == text
    assert any("between backward and the update" in caveat for caveat in found.caveats)


def test_statements_in_the_loop_itself_are_replayed(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    notes = []
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
        (model(torch.randn(4, 3)) * 0).sum().backward()
        notes.append("once")
        for p in model.parameters():
            p.grad.data.mul_(1 / p.grad.norm())
        optimizer.step()
    (event,) = Run(tmp_path / "run").events("origin")
    assert event.data["operation"] in ("div", "reciprocal")
    assert "p.grad.data.mul_" in event.data["text"]
    assert notes == ["once"]


def test_the_gradients_that_the_optimizer_uses_are_not_changed(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
        (model(torch.randn(4, 3)) * 0).sum().backward()
        normalize(model.parameters())
        gradient = model.weight.grad
        optimizer.step()
        assert model.weight.grad is gradient
        assert gradient.isnan().all()


@pytest.mark.parametrize("change", [with_output, with_a_note])
def test_a_statement_with_another_effect_is_run_again_without_that_effect_on_the_training(change, tmp_path, capsys):
    NOTES.clear()
    run = trained(tmp_path, change)
    assert [*NOTES, capsys.readouterr().out] in ([""], ["normalized", ""], ["normalizing"])
    (event,) = Run(run).events("origin")
    assert event.data["operation"] in ("div", "reciprocal")
