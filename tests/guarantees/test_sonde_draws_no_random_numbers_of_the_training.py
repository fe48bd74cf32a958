"""R02: Sonde never draws from a generator that belongs to the training."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sonde
from model_examples import PROGRAMS, Program
from training_harness import train, watched

SONDE = str(Path(sonde.__file__).parent)
SWITCHBOARD = str(Path(SONDE, "capture", "calls.py"))  # the user's own calls pass through it


GENERATORS: list[tuple[Any, str]] = [
    (torch, "rand randn randint randperm rand_like randn_like randint_like bernoulli normal multinomial manual_seed seed set_rng_state"),
    (torch.Tensor, "random_ uniform_ normal_ bernoulli_ exponential_"),
    (random, "random randint randrange choice choices shuffle sample uniform gauss getrandbits randbytes seed setstate"),
    (np.random, "rand randn randint random random_sample choice shuffle permutation normal uniform bytes seed set_state"),
]


def _is_ours(depth: int = 2) -> bool:
    frame = sys._getframe(depth)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(SONDE) and name != SWITCHBOARD:
            return True
        frame = frame.f_back
    return False


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the random functions called from inside Sonde; each such call raises. (Draws by others are counted as "allowed".)"""
    drawn: list[str] = []

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def drawing(*args: Any, **kwargs: Any) -> Any:
            if _is_ours():
                drawn.append(name)
                raise AssertionError(f"Sonde called {name}")
            drawn.append("allowed")
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, drawing)

    for owner, names in GENERATORS:
        for name in names.split():
            watch(owner, name)
    return drawn


@pytest.mark.parametrize("every", [1, None], ids=["every step", "default"])
@pytest.mark.parametrize("program", PROGRAMS[:6], ids=str)
def test_r02_the_generators_agree_after_attaching_every_step_and_detaching(program: Program, every: int | None, tmp_path: Path) -> None:
    expected = train(program)
    observed = train(program, observe=watched(tmp_path, every=every))
    assert len(set(expected.generators)) > len(expected.losses)  # they do move, so that a difference would show
    assert observed.generators == expected.generators


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_r02_nothing_random_is_called_while_sonde_is_on_the_stack(program: Program, draws: list[str], tmp_path: Path) -> None:
    train(program, observe=watched(tmp_path))
    assert set(draws) == {"allowed"}


def test_r02_the_alarm_for_random_calls_works(draws: list[str], tmp_path: Path) -> None:
    code = compile("def inside(call):\n    call()\n", str(Path(SONDE, "capture", "anything.py")), "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    with pytest.raises(AssertionError, match="Sonde called rand"):
        names["inside"](lambda: torch.rand(1))
    assert draws == ["rand"]
