"""R01: a watched training and a bare one end with the same bits, in every loss, parameter, buffer and optimizer state."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

import bfloat16
import sonde
from model_examples import BY_NAME, PROGRAMS, Gan, Program, gan_step
from training_harness import OPTIMIZERS, Outcome, digest, new_path, seed, train, watched


@cache
def bare_outcome(name: str, optimizer: str, bf16: bool) -> Outcome:
    return train(BY_NAME[name], OPTIMIZERS[optimizer], bf16=bf16)


def test_bare_training_repeats_itself_bit_by_bit() -> None:
    first, second = train(BY_NAME["conv"]), train(BY_NAME["conv"])
    assert first == second
    assert first != train(BY_NAME["conv"], OPTIMIZERS["AdamW fused"])


@pytest.mark.parametrize("every", [1, None], ids=["every step", "default"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_r01_a_watched_training_is_bit_identical(program: Program, optimizer: str, bf16: bool, every: int | None, tmp_path: Path) -> None:
    if bf16:
        bfloat16.require("linear", "convolution", *(["LSTM"] if "lstm" in program.name else []))
    expected = bare_outcome(program.name, optimizer, bf16)
    observed = train(program, OPTIMIZERS[optimizer], watched(tmp_path, every=every), bf16=bf16)
    assert observed == expected
    run = sonde.Run(tmp_path / "run0")
    assert run.last_step == len(observed.losses) - 1
    assert "gradient" in run.kinds


@pytest.mark.parametrize("program", [program for program in PROGRAMS if program.repeats][:6], ids=str)
def test_r01_lbfgs_is_bit_identical(program: Program, tmp_path: Path) -> None:
    def minimise(to: Path | None) -> str:
        seed()
        model = program.build()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        session = sonde.watch(model, optimizer, to=to, every=1, strict=True) if to else None
        losses = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            torch.manual_seed(3)
            loss = program.loss(model)
            loss.backward()
            losses.append(loss.item())
            return loss

        for _ in range(3):
            optimizer.step(closure)
        if session is not None:
            session.close()
        return digest(losses, model.state_dict(), optimizer.state_dict())

    assert minimise(tmp_path / "run") == minimise(None)


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # torch's compiler raises some of its own
@pytest.mark.parametrize("name", ["mlp", "conv", "tied"])
def test_r01_a_compiled_training_is_bit_identical(name: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    expected = train(BY_NAME[name], OPTIMIZERS["AdamW foreach"], backend="aot_eager")
    torch._dynamo.reset()
    observed = train(BY_NAME[name], OPTIMIZERS["AdamW foreach"], watched(tmp_path), backend="aot_eager")
    torch._dynamo.reset()
    assert observed == expected


@pytest.mark.parametrize("every", [1, None], ids=["every step", "default"])
def test_r01_a_gan_with_two_optimizers_is_bit_identical(every: int | None, tmp_path: Path) -> None:
    def play(to: Path | None) -> str:
        seed()
        gan = Gan()
        of_maker = torch.optim.Adam(gan.maker.parameters(), lr=0.01)
        of_judge = torch.optim.Adam(gan.judge.parameters(), lr=0.01)
        session = None
        if to:
            session = sonde.DebugSession(sonde.DebugConfig(every=every), to=to, strict=True)
            session.attach(gan.maker, of_maker, name="maker").attach(gan.judge, of_judge, name="judge").start()
        losses = [gan_step(gan.maker, gan.judge, of_maker, of_judge) for _ in range(6)]
        if session is not None:
            session.close()
        return digest(losses, gan.state_dict(), of_maker.state_dict(), of_judge.state_dict())

    assert play(new_path(tmp_path)) == play(None)
