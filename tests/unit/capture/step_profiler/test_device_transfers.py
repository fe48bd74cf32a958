"""What is recorded of tensors that go from one device to another. The meta device stands for one: it computes nothing, but what goes there
leaves the CPU. Whole programs on a device that computes are in tests/programs/test_device_transfer_programs.py.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
from torch import nn  # noqa: E402

import sonde  # noqa: E402
from training_harness import patched_functions  # noqa: E402

PROFILED = 11  # the transfers of the step after it are recorded


def steps(tmp_path: Path, own: Callable[[int], Any], *, num: int = PROFILED + 3, strict: bool = True) -> sonde.Run:
    """Trains a small model on the CPU; each step does what the test wants besides, and step 11 is profiled."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1000, strict=strict) as session:
        profiler = session._tracker.step_profiler
        for step in range(num):
            profiler.long_ns, profiler.due_ns = 0, 0 if step == PROFILED - 1 else 1 << 62
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            own(step + 1)  # the step ends with the next call of the loop, or the last one
    return sonde.Run(tmp_path / "run")


def moved(run: sonde.Run) -> dict[str, Any]:
    """The one line that moved anything."""
    (event,) = run.events("transfers")
    (row,) = event.data["transfers"]
    return dict(row)


def test_the_step_after_the_profile_records_what_it_moved_and_from_where_to_where(tmp_path):
    constant = torch.zeros(10, 16)
    run = steps(tmp_path, lambda step: constant.to("meta"))
    (event,) = run.events("transfers")
    row = moved(run)
    assert event.step == PROFILED + 1
    assert (row["call"], row["origin"], row["target"], row["num"], row["num_bytes"]) == (".to()", "cpu", "meta", 1, 640)
    assert (row["what"], row["num_same"], row["num_again"], row["num_pageable"]) == ("float32 [10, 16]", 1, 0, 0)
    assert row["line"].startswith("test_device_transfers.py:")
    assert 'constant.to("meta")' in row["text"]
    assert row["ms"] > 0


@pytest.mark.parametrize(
    "move",
    [
        lambda tensor: tensor.to("meta"), lambda tensor: tensor.to(device="meta"), lambda tensor: tensor.to(torch.empty(0, device="meta")),
        lambda tensor: tensor[1:].unsqueeze(0).to("meta", torch.float64), lambda tensor: torch.empty(8, device="meta").copy_(tensor),
        lambda tensor: torch.empty(8, device="meta").copy_(other=tensor),
    ],
    ids=["device", "by name", "like another", "a view", "copy_", "copy_ by name"],
)  # fmt: skip
def test_every_way_to_move_the_same_tensor_is_recorded(tmp_path, move):
    constant = torch.zeros(8)
    assert moved(steps(tmp_path, lambda step: move(constant)))["num_same"] == 1


def test_a_tensor_that_is_moved_several_times_in_a_step_is_counted_as_such(tmp_path):
    def thrice(step: int) -> None:
        mask = torch.full((8,), float(step))
        for _ in range(3):
            mask.to("meta")

    row = moved(steps(tmp_path, thrice))
    assert (row["num"], row["num_same"], row["num_again"]) == (3, 0, 2)


def another_slice(data: torch.Tensor = torch.zeros(200)) -> Callable[[int], torch.Tensor]:  # noqa: B008
    return lambda step: data[step : step + 8].to("meta")


def written_by_torch(buffer: torch.Tensor = torch.zeros(8)) -> Callable[[int], torch.Tensor]:  # noqa: B008
    return lambda step: buffer.add_(1).to("meta")


def written_by_numpy(buffer: torch.Tensor = torch.zeros(8)) -> Callable[[int], torch.Tensor]:  # noqa: B008
    def move(step: int) -> torch.Tensor:
        buffer.numpy()[:] = step
        return buffer.to("meta")

    return move


@pytest.mark.parametrize(
    "own",
    [lambda step: torch.zeros(8).to("meta"), another_slice(), written_by_torch(), written_by_numpy()],
    ids=["made anew, at the same address", "another part of the data", "written by torch", "written by numpy"],
)
def test_what_is_not_the_same_tensor_with_the_same_contents_is_not_called_so(tmp_path, own):
    row = moved(steps(tmp_path, own))
    assert (row["num"], row["num_same"], row["num_again"]) == (1, 0, 0)


def test_nothing_that_was_moved_is_held(tmp_path):
    alive: list[weakref.ref[torch.Tensor]] = []

    def own(step: int) -> None:
        assert not any(ref() is not None for ref in alive)
        batch = torch.zeros(8)
        alive.append(weakref.ref(batch))
        batch.to("meta")

    assert moved(steps(tmp_path, own))["num"] == 1


def test_what_stays_where_it_is_is_no_transfer_and_the_next_step_is_left_alone(tmp_path):
    patched = []

    def own(step: int) -> None:
        torch.ones(3).to(torch.float64).cpu().to("cpu").copy_(torch.zeros(3))
        patched.append("to" in torch.Tensor.__dict__)

    run = steps(tmp_path, own)
    (profile,) = run.events("xray")
    assert profile.data["num_transfers"] == 0
    assert list(run.events("transfers")) == []
    assert sum(patched) == 1  # in the step that was profiled


def test_what_torch_and_other_threads_move_is_not_the_users(tmp_path):
    constant = torch.zeros(8)

    def own(step: int) -> None:
        nn.Linear(4, 4).to("meta")
        thread = threading.Thread(target=lambda: constant.to("meta"))
        thread.start()
        thread.join()

    (profile,) = steps(tmp_path, own).events("xray")
    assert profile.data["num_transfers"] == 0


def test_looking_at_a_tensor_is_not_taken_for_a_wait_of_the_user(tmp_path):
    constant = torch.zeros(8)
    (profile,) = steps(tmp_path, lambda step: constant.to("meta")).events("xray")
    assert profile.data["waits"] == []


def test_r07_two_steps_are_recorded_and_then_all_is_as_before(tmp_path):
    constant, found = torch.zeros(8), {}

    def own(step: int) -> None:
        constant.to("meta")
        found[step] = (patched_functions(), {name: torch.Tensor.__dict__.get(name) for name in ("to", "cuda", "cpu", "copy_")})

    steps(tmp_path, own)
    assert [step for step in found if found[step][1]["to"] is not None] == [PROFILED, PROFILED + 1]
    assert found[PROFILED - 1] == found[PROFILED + 2]


def test_r07_a_training_that_ends_in_between_leaves_nothing_behind(tmp_path):
    constant, before = torch.zeros(8), patched_functions()
    run = steps(tmp_path, lambda step: constant.to("meta"), num=PROFILED + 1)
    assert patched_functions() == before
    assert "to" not in torch.Tensor.__dict__
    assert [event.data["num_transfers"] for event in run.events("xray")] == [1]


def test_a_child_that_is_forked_meanwhile_is_not_patched(tmp_path):
    constant, statuses = torch.zeros(8), []

    def own(step: int) -> None:
        constant.to("meta")
        if step in (PROFILED, PROFILED + 1):
            child = os.fork()
            if child == 0:
                os._exit(len({"to", "item", "cpu"} & set(torch.Tensor.__dict__)))
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    assert moved(steps(tmp_path, own))["num_same"] == 1
    assert statuses == [0, 0]


def test_r08_a_move_that_fails_raises_what_it_would_raise(tmp_path):
    errors = []

    def own(step: int) -> None:
        try:
            torch.zeros(8, device="meta").cpu()
        except NotImplementedError as error:
            errors.append(str(error))

    (profile,) = steps(tmp_path, own).events("xray")
    assert profile.data["num_transfers"] == 0
    assert len(set(errors)) == 1


def test_an_error_of_ours_does_not_reach_the_training_and_is_raised_where_it_is_strict(tmp_path, monkeypatch):
    monkeypatch.setattr("sonde.capture.step_profiler.device_transfers.content_hash", lambda tensor: 1 / 0)
    constant, found = torch.zeros(8), []
    with pytest.raises(ZeroDivisionError):
        steps(tmp_path / "strict", lambda step: found.append(constant.to("meta")))
    found.clear()
    run = steps(tmp_path, lambda step: found.append(constant.to("meta").device.type), strict=False)
    assert found == ["meta"] * (PROFILED + 3)
    assert list(run.events("transfers")) == []
    assert "to" not in torch.Tensor.__dict__
    assert sys.gettrace() is None
