"""R21–R23: what counts as a step, whatever the loop looks like; gradients are those that the optimizer was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sonde
from model_examples import Gan, gan_step


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def watch(model: nn.Module, optimizer: Any, tmp_path: Path, **more: Any) -> sonde.DebugSession:
    return sonde.watch(model, optimizer, to=tmp_path / "run", strict=True, **({"every": 1} | more))


def test_r21_accumulated_gradients_are_one_step_with_their_sum(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    truth = []
    with watch(model, optimizer, tmp_path):
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(4):
                (model(torch.randn(5, 3)).square().mean() / 4).backward()
            truth.append(model[0].weight.grad.norm().item())
            optimizer.step()
    run = sonde.Run(tmp_path / "run")
    assert run.last_step == 2
    for name in ("forwards", "backwards"):
        assert run.scalar(name)[1].tolist() == [4, 4, 4]
    assert run.scalar("optimizer_steps")[1].tolist() == [1, 1, 1]
    assert run.scalar("stale_updates")[1].tolist() == [0, 0, 0]
    assert run.series("gradient", "0.weight", "l2")[1] == pytest.approx(truth, rel=1e-5)


def test_r21_the_loss_of_an_accumulated_step_is_the_mean_over_its_parts(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    losses = []
    with watch(model, optimizer, tmp_path):
        for _ in range(4):
            loss = model(torch.randn(5, 3)).square().mean()
            losses.append(loss.item())
            loss.backward()
        optimizer.step()
    assert sonde.Run(tmp_path / "run").scalar("loss")[1] == pytest.approx([sum(losses) / 4])


# -- R22 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 100], ids=["observed", "not observed"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_r22_a_step_that_the_grad_scaler_holds_back_is_said_to_be_skipped(fused: bool, every: int, tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused, foreach=False if not fused else None)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    moved = []
    with watch(model, optimizer, tmp_path, every=every):
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(5, 3)).square().mean()
            before = model[0].weight.detach().clone()
            scaler.scale(loss * float("inf") if step == 2 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            moved.append(not torch.equal(before, model[0].weight))
    run = sonde.Run(tmp_path / "run")
    assert moved == [True, True, False, True]
    assert run.scalar("optimizer_steps")[1].tolist() == [1, 1, 0, 1]
    assert run.scalar("skipped_steps")[1].tolist() == [0, 0, 1, 0]
    assert run.scalar("loss_scale")[1].tolist() == [1024, 1024, 1024, 512]


def test_r22_losses_are_unscaled_and_unscale_is_seen_by_the_gradients(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    with watch(model, optimizer, tmp_path):
        loss = model(torch.randn(5, 3)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = model[0].weight.grad.norm().item()
        scaler.step(optimizer)
        scaler.update()
    run = sonde.Run(tmp_path / "run")
    assert run.scalar("loss")[1] == pytest.approx([loss.item()])
    assert run.series("gradient", "0.weight", "l2")[1] == pytest.approx([norm], rel=1e-5)


# -- R23 -------------------------------------------------------------------------------------------


def test_r23_lbfgs_counts_one_step_for_all_its_closures(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
    x, calls = torch.randn(8, 3), []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        calls.append(1)
        return loss

    with watch(model, optimizer, tmp_path):
        for _ in range(3):
            optimizer.step(closure)
            calls.append(0)
    run = sonde.Run(tmp_path / "run")
    assert run.last_step == 2
    assert run.scalar("optimizer_steps")[1].tolist() == [1, 1, 1]
    assert run.scalar("backwards")[1].sum() == sum(calls)
    assert run.scalar("stale_updates")[1].sum() == 0


def test_r23_two_optimizers_in_turn_make_one_step_per_round(tmp_path: Path) -> None:
    gan = Gan()
    of_maker = torch.optim.Adam(gan.maker.parameters(), lr=0.01)
    of_judge = torch.optim.Adam(gan.judge.parameters(), lr=0.01)
    with watch(gan, [of_maker, of_judge], tmp_path):
        for _ in range(6):
            gan_step(gan.maker, gan.judge, of_maker, of_judge)
    run = sonde.Run(tmp_path / "run")
    assert run.last_step == 5
    assert run.scalar("optimizer_steps")[1].tolist() == [2] * 6
    assert run.scalar("backwards")[1].tolist() == [2] * 6


def test_r23_two_optimizers_of_one_model_make_one_step_per_round(tmp_path: Path) -> None:
    model = make()
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(20, 3)), batch_size=4)
    with watch(model, [first, second], tmp_path):
        for (x,) in loader:
            first.zero_grad()
            second.zero_grad()
            model(x).square().mean().backward()
            first.step()
            second.step()
    run = sonde.Run(tmp_path / "run")
    assert run.last_step == 4
    assert run.scalar("optimizer_steps")[1].tolist() == [2] * 5


def test_r23_an_optimizer_per_parameter_that_steps_inside_of_backward(tmp_path: Path) -> None:
    model = make()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()  # frees the gradient

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    with watch(model, list(optimizers.values()), tmp_path):
        for _ in range(6):
            model(torch.randn(5, 3)).square().mean().backward()
    run = sonde.Run(tmp_path / "run")
    assert run.last_step == 5
    assert run.scalar("optimizer_steps")[1].tolist() == [4] * 6
    assert run.series("gradient", "0.weight", "num")[1].tolist() == [12] * 6
    assert run.series("update", "0.weight", "l2")[1].min() > 0


@pytest.mark.parametrize("way", ["no_grad", "data"])
def test_r23_parameters_moved_by_hand_without_an_optimizer_make_steps(way: str, tmp_path: Path) -> None:
    model = make()
    with watch(model, None, tmp_path):
        for _ in range(6):
            model.zero_grad()
            model(torch.randn(5, 3)).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    if way == "data":
                        p.data -= 0.1 * p.grad
                    else:
                        p -= 0.1 * p.grad
    run = sonde.Run(tmp_path / "run")
    assert run.last_step == 5
    assert run.scalar("backwards")[1].tolist() == [1] * 6
    assert run.scalar("optimizer_steps")[1].sum() == 0
    assert run.scalar("manual_updates")[1].sum() >= 5


def test_r23_a_second_backward_for_a_sharpness_aware_step_is_not_a_step(tmp_path: Path) -> None:
    """SAM moves the parameters by hand, runs backward again, moves them back, and steps once."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, tmp_path):
        for _ in range(6):
            x = torch.randn(5, 3)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            away = [0.05 * p.grad for p in model.parameters()]
            with torch.no_grad():
                for p, way in zip(model.parameters(), away):
                    p += way
            optimizer.zero_grad()
            model(x).square().mean().backward()
            with torch.no_grad():
                for p, way in zip(model.parameters(), away):
                    p -= way
            optimizer.step()
    run = sonde.Run(tmp_path / "run")
    assert run.last_step == 5
    assert run.scalar("backwards")[1].tolist() == [2] * 6
    assert run.scalar("optimizer_steps")[1].tolist() == [1] * 6


def test_r23_another_model_trained_beside_the_watched_one_counts_for_nothing(tmp_path: Path) -> None:
    model, other = make(), make()
    optimizer, others = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(other.parameters(), lr=0.1)
    with watch(model, optimizer, tmp_path):
        for _ in range(3):
            for _ in range(2):
                others.step()
            model(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = sonde.Run(tmp_path / "run")
    assert run.last_step == 2
    assert run.scalar("optimizer_steps")[1].tolist() == [1, 1, 1]
