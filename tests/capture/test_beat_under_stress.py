"""What a user's hooks, destructors and signals may do in the middle of a step that the native kernel takes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

import sonde

pytestmark = pytest.mark.torch


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 6)).square().mean().backward()
    optimizer.step()


def test_a_hook_of_the_users_may_close_the_session_in_the_middle_of_a_forward(tmp_path: Path) -> None:
    model, optimizer = pair()
    sessions: list[sonde.DebugSession] = []

    def leave(module: nn.Module, args: object) -> None:
        if sessions:
            sessions.pop().close()

    model.register_forward_pre_hook(leave)  # torch has listed our hook already when this one runs
    session = sonde.watch(model, optimizer, to=tmp_path)
    one_step(model, optimizer)
    sessions.append(session)
    one_step(model, optimizer)
    assert not sessions
    assert sonde.Run(tmp_path).last_step == 0
