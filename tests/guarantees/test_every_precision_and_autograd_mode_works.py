"""R05: statistics are right whatever the precision. R06: every mode of autograd works, with the same results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bfloat16
import sonde
from model_examples import BY_NAME
from training_harness import bare, digest, seed, train, watched


def reference(tensor: torch.Tensor) -> dict[str, float]:
    x = tensor.detach().to(torch.float64)
    return {
        "num": x.numel(), "mean": x.mean().item(), "std": x.std(correction=0).item(), "min": x.min().item(), "max": x.max().item(),
        "l2": x.norm().item(), "zeros": int((x == 0).sum()),
    }  # fmt: skip


def check(run: sonde.Run, kind: str, path: str, tensor: torch.Tensor) -> None:
    for field, expected in reference(tensor).items():
        _, values = run.series(kind, path, field)
        assert values[-1] == pytest.approx(expected, rel=1e-5, abs=1e-7), (kind, path, field)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_r05_statistics_agree_with_float64_in_every_precision(dtype: torch.dtype, autocast: torch.dtype | None, tmp_path: Path) -> None:
    if torch.bfloat16 in (dtype, autocast):
        bfloat16.require("linear")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 4)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept: dict[str, torch.Tensor] = {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda _m, _a, out, name=name: kept.__setitem__(name, out.detach().clone()))
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        # values near 1000: their squares are too large for float16, and the spread is small beside the mean
        x = (torch.randn(32, 64) + 300).to(dtype)
        with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
            out = model(x)
        out.float().mean().backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    run = sonde.Run(tmp_path / "run")
    assert set(kept) == {"0", "1", "2"}
    for name, tensor in kept.items():
        check(run, "activation", name, tensor)
    for name, p in model.named_parameters():
        check(run, "parameter", name, before[name])
        check(run, "gradient", name, gradients[name])
        if dtype is torch.float32:
            check(run, "update", name, p.detach().double() - before[name].double())
    check(run, "batch", "input.0", x)


def test_r05_the_gradient_norm_is_not_lost_in_half_precision(tmp_path: Path) -> None:
    model = nn.Linear(300, 300, bias=False).to(torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        model(torch.full((1, 300), 100.0, dtype=torch.float16)).sum().backward()
        optimizer.step()
    _, norms = sonde.Run(tmp_path / "run").scalar("grad_norm")
    assert norms[0] == pytest.approx(model.weight.grad.double().norm().item(), rel=1e-5)
    assert norms[0] > 29_000  # the sum of squares, 9e8, does not exist in float16


# -- R06 -------------------------------------------------------------------------------------------

Training = Callable[[nn.Module, torch.optim.Optimizer], float]


def _evaluating(mode: Callable[[], AbstractContextManager[Any]]) -> Training:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        model.eval()
        with mode():
            score = model(torch.randn(4, 6)).sum().item()
        model.train()
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        return score

    return step


def _gradient_penalty(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    x = torch.randn(4, 6, requires_grad=True)
    out = model(x).sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    loss = out.square() + slope.square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def _create_graph(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad(set_to_none=True)
    loss = model(torch.randn(4, 6)).square().mean()
    loss.backward(create_graph=True)
    penalty = sum(p.grad.square().sum() for p in model.parameters())
    penalty.backward()
    optimizer.step()
    for p in model.parameters():
        p.grad = None  # breaks the cycle that torch warns of
    return loss.item()


def _retain_graph(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.randn(4, 6)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    return loss.item()


def _detect_anomaly(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    with torch.autograd.detect_anomaly():
        optimizer.zero_grad()
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
    optimizer.step()
    return loss.item()


MODES: dict[str, Training] = {
    "inference mode": _evaluating(torch.inference_mode),
    "no grad": _evaluating(torch.no_grad),
    "double backward": _gradient_penalty,
    "create graph": _create_graph,
    "retain graph": _retain_graph,
    "detect anomaly": _detect_anomaly,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("name", MODES)
def test_r06_every_mode_of_autograd_gives_the_same_results_and_the_right_number_of_steps(name: str, tmp_path: Path) -> None:
    def run(observe: Any) -> str:
        seed()
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters())
        with observe(model, optimizer):
            losses = [MODES[name](model, optimizer) for _ in range(4)]
        return digest(losses, model.state_dict(), optimizer.state_dict())

    assert run(watched(tmp_path)) == run(bare)
    run_ = sonde.Run(tmp_path / "run0")
    assert run_.last_step == 3
    assert not list(run_.events("retired"))


def test_r06_forwards_without_gradients_are_counted_apart(tmp_path: Path) -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        for _ in range(3):
            MODES["inference mode"](model, optimizer)
            with torch.no_grad():
                model(torch.randn(2, 6))
    run = sonde.Run(tmp_path / "run")
    assert run.scalar("forwards")[1].tolist() == [1, 1, 1]
    assert run.scalar("eval_forwards")[1].sum() >= 5  # the last one has no step after it


def test_r06_a_model_that_is_only_evaluated_under_inference_mode_is_left_alone(tmp_path: Path) -> None:
    model = BY_NAME["conv"].build().eval()
    with torch.inference_mode():
        x = torch.randn(2, 3, 6, 6)
        expected = model(x)
        with sonde.watch(model, to=tmp_path / "run", every=1, strict=True):
            assert torch.equal(model(x), expected)
    assert sonde.Run(tmp_path / "run").last_step == -1


def test_r06_a_graph_kept_over_steps_is_not_measured_twice(tmp_path: Path) -> None:
    """The hook on an old output still fires when its graph is used again; what it then sees belongs to no step."""
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        kept = model(torch.ones(3, 6)).sum()
        for step in range(3):
            (kept * 10**step).backward(retain_graph=True)
            optimizer.step()
    steps, largest = sonde.Run(tmp_path / "run").series("activation_gradient", "", "max")
    assert steps.tolist() == [0]
    assert np.array_equal(largest, [1.0])


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_r06_the_zoo_trains_alike_under_detect_anomaly(tmp_path: Path) -> None:
    with torch.autograd.detect_anomaly():
        expected = train(BY_NAME["residual"])
        assert train(BY_NAME["residual"], observe=watched(tmp_path)) == expected
