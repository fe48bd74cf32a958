"""Out of memory: the error that ended a training, explained in the user's terms."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import sonde
from sonde.capture.step_inputs_for_replay import ReplayBuffer
from sonde.incidents.out_of_memory_handler import explain_out_of_memory, find_out_of_memory

pytestmark = pytest.mark.torch
TOO_MUCH = 1 << 48  # numbers: more than any machine has addresses for


class Greedy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.hungry = Hungry()

    def forward(self, x):
        return self.hungry(self.first(x))


class Hungry(nn.Module):
    def forward(self, x):
        return x.new_empty(TOO_MUCH).sum() + x


def train(model, optimizer):
    for step in range(3):
        batch = torch.randn(16, 8)
        loss = model.first(batch).sum() if step < 2 else model(batch).sum()
        loss.backward()
        optimizer.step()


def fail(what):
    try:
        what()
    except Exception as error:
        return error
    raise AssertionError


def test_every_kind_of_out_of_memory_error_is_recognized():
    for error in (
        fail(lambda: torch.empty(TOO_MUCH)), fail(lambda: np.zeros(TOO_MUCH)), MemoryError(), torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] std::bad_alloc"),
    ):  # fmt: skip
        assert find_out_of_memory(error) is error
    assert find_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert find_out_of_memory(None) is None


def test_an_error_below_another_is_found():
    def step():
        try:
            torch.empty(TOO_MUCH)
        except RuntimeError as error:
            raise ValueError("the step failed") from error

    outer = fail(step)
    assert isinstance(outer, ValueError)
    assert find_out_of_memory(outer) is outer.__cause__


@pytest.mark.parametrize(
    ("what", "requested", "shape"),
    [
        (lambda: torch.empty(TOO_MUCH), 4 * TOO_MUCH, ""),
        (lambda: np.zeros((TOO_MUCH, 2)), 16 * TOO_MUCH, f"({TOO_MUCH}, 2) float64"),
        (lambda: bytearray(1 << 62), None, ""),
    ],
    ids=["torch", "numpy", "python"],
)
def test_what_was_asked_for_is_read_from_the_message(what, requested, shape):
    found = explain_out_of_memory(fail(what), {}, [], ReplayBuffer())
    assert found.requested == (pytest.approx(requested, rel=0.01) if requested else None)
    assert found.shape == shape
    assert found.in_use > 0


def test_cuda_messages_are_understood():
    message = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 15.77 GiB of which 14.5 GiB is free."
    assert explain_out_of_memory(torch.OutOfMemoryError(message), {}, [], ReplayBuffer()).requested == 20 << 30


def test_a_watched_training_that_runs_out_of_memory_is_explained(tmp_path):
    model = Greedy()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(RuntimeError, match="allocate"), sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
        train(model, optimizer)
    report = sonde.diagnose(tmp_path / "run")
    finding = report.findings[0]
    assert finding.rule == "out-of-memory"
    assert finding.where == "hungry"
    assert "in the forward of hungry (Hungry)" in finding.cause
    assert "parameters 288 bytes" in finding.cause
    assert finding.evidence["operand 1"] == "x [16, 8] float32"
    assert "return x.new_empty" in finding.evidence["source_text"]
    assert "larger than all of the memory" in finding.fix
    assert report.run.ended == "exception"


def test_an_ordinary_error_leaves_no_out_of_memory_event(tmp_path):
    model = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="shapes"), sonde.watch(model, to=tmp_path / "run", strict=True):
        model(torch.randn(2, 5))
    assert not list(sonde.Run(tmp_path / "run").events("out_of_memory"))
