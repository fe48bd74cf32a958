"""R03: hooks change nothing that flows through them. R04: the state of the process stays as it was found."""

from __future__ import annotations

from collections import namedtuple
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
from model_examples import BY_NAME, Pair
from training_harness import bare, patched_functions, process_state, setting, train, watched

Named = namedtuple("Named", "left right")

OUTPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: x,
    "none": lambda x: None,
    "int": lambda x: 3,
    "text": lambda x: "text",
    "tuple": lambda x: (x, x * 2),
    "list": lambda x: [x, None, "text"],
    "dict": lambda x: {"a": x, "b": {"c": [x * 2]}},
    "dataclass": lambda x: Pair(x, x * 2),
    "namedtuple": lambda x: Named(x, 1),
    "object": lambda x: object(),
}


class Gives(nn.Module):
    """Puts out a thing made from its input and remembers it."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make, self.last = make, None

    def forward(self, x: torch.Tensor) -> Any:
        self.last = self.make(x)
        return self.last


class Passes(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.gives, self.received = nn.Linear(3, 3), Gives(make), None

    def forward(self, x: torch.Tensor) -> Any:
        self.seen = self.first(x)
        self.traits = (self.seen._version, self.seen.requires_grad, type(self.seen.grad_fn), self.seen.is_leaf)
        self.received = self.gives(self.seen)
        return self.received


@pytest.mark.parametrize("kind", OUTPUTS)
def test_r03_outputs_are_the_same_objects_with_the_same_versions(kind: str, tmp_path: Path) -> None:
    model = Passes(OUTPUTS[kind])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        for _ in range(3):
            result = model(torch.randn(2, 3))
            assert result is model.received
            assert model.received is model.gives.last
            assert model.traits == (0, True, type(torch.nn.functional.linear(torch.ones(1, 3), *model.first.parameters()).grad_fn), False)
            assert model.seen._version == 0
            model.seen.sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_r03_inputs_parameters_and_gradients_keep_their_versions(tmp_path: Path) -> None:
    def versions(observe: Any) -> list[int]:
        seen = []
        model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with observe(model, optimizer):
            for _ in range(4):
                x = torch.ones(2, 3)
                loss = model(x).sum()
                loss.backward()
                optimizer.step()
                things = [x, loss, *model.parameters(), *(p.grad for p in model.parameters())]
                seen += [thing._version for thing in things]
        return seen

    assert versions(watched(tmp_path)) == versions(bare)


# -- R04 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, None], ids=["every step", "default"])
def test_r04_the_state_of_the_process_is_the_same_at_every_moment(every: int | None, tmp_path: Path) -> None:
    sonde.watch(nn.Linear(1, 1), to=tmp_path / "first").close()  # what importing does (lazy torch modules) is not what watching does
    before, functions = process_state(), patched_functions()
    model = BY_NAME["conv"].build()
    optimizer = torch.optim.AdamW(model.parameters())
    session = sonde.watch(model, optimizer, to=tmp_path / "run", every=every, strict=True)
    assert process_state() == before
    for _ in range(3):
        optimizer.zero_grad()
        BY_NAME["conv"].loss(model).backward()
        optimizer.step()
        assert process_state() == before
    session.close()
    assert process_state() == before
    assert patched_functions() == functions


@pytest.mark.needs_bfloat16("linear")
def test_r04_hooks_run_user_code_under_the_users_own_modes(tmp_path: Path) -> None:
    """What a later hook, or the next module, sees is not our sandbox."""
    seen: list[Any] = []
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model[0].register_forward_hook(lambda *_: seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                out = model(torch.ones(2, 3))
                seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
            out.sum().backward()
            optimizer.step()
    assert set(seen) == {(True, True)}


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return setting(lambda: torch.set_default_dtype(dtype), lambda: torch.set_default_dtype(torch.float32))


def one_thread() -> AbstractContextManager[None]:
    threads = torch.get_num_threads()
    return setting(lambda: torch.set_num_threads(1), lambda: torch.set_num_threads(threads))


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default dtype float16": lambda: default_dtype(torch.float16),
    "deterministic": lambda: setting(lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)),
    "numpy raises": lambda: np.errstate(all="raise"),
    "one thread": one_thread,
}


@pytest.mark.parametrize("program", ["mlp", "conv", "lstm", "shared", "dict output"])
@pytest.mark.parametrize("name", SETTINGS)
def test_r04_training_is_identical_under_unusual_settings(name: str, program: str, tmp_path: Path) -> None:
    if "bfloat16" in name:
        bfloat16.require()
    with SETTINGS[name]():
        expected = train(BY_NAME[program])
        observed = train(BY_NAME[program], observe=watched(tmp_path))
    assert observed == expected
    assert not list(sonde.Run(tmp_path / "run0").events("retired"))


def test_r04_training_is_identical_while_new_tensors_go_to_the_meta_device(tmp_path: Path) -> None:
    def run(observe: Any) -> list[float]:
        torch.manual_seed(0)
        model, x = BY_NAME["mlp"].build(), torch.randn(5, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        with torch.device("meta"), observe(model, optimizer):
            for _ in range(3):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses

    assert run(watched(tmp_path)) == run(bare)
    assert sonde.Run(tmp_path / "run0").last_step == 2
