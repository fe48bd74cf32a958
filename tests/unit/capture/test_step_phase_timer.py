"""Where the time of a step goes: every moment has one phase, and together they are the step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import sonde

PHASES = ("data", "transfer", "forward", "backward", "optimizer", "validation", "checkpoint", "other")
NAP_S = 0.02  # many times what anything else takes here


class Naps(Dataset):
    """Samples that take their time."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(NAP_S)
        return torch.ones(3) * index


def trained(tmp_path: Path, between: Callable[[nn.Module, int], None], *, every: int | None = None, num: int = 4) -> sonde.Run:
    """A training of some steps; after each update something else happens."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=every, strict=True):
        for step in range(num):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            between(model, step)
    return sonde.Run(tmp_path / "run")


def ms(run: sonde.Run, phase: str) -> list[float]:
    return run.scalar(f"{phase}_ms")[1].tolist()


@pytest.mark.parametrize("every", [1, None], ids=["every step", "default"])
def test_the_phases_and_sondes_own_time_add_up_to_the_step(tmp_path, every):
    def between(model, step):
        time.sleep(0.002)
        with torch.no_grad():
            model(torch.ones(1, 3))
        torch.save(model.state_dict(), tmp_path / "model.pt")

    run = trained(tmp_path, between, every=every, num=8)
    whole = np.array(ms(run, "step"))
    parts = sum(np.array(ms(run, phase)) for phase in PHASES) + np.array(ms(run, "sonde"))
    assert parts == pytest.approx(whole, rel=0.02, abs=0.1)


def test_torch_save_is_checkpointing_of_the_step_that_follows(tmp_path):
    class Slow:
        def __reduce__(self):
            time.sleep(NAP_S)
            return int, ()

    run = trained(tmp_path, lambda model, step: torch.save(Slow(), tmp_path / "it.pt") if step == 1 else None)
    saving = ms(run, "checkpoint")
    assert saving[2] >= 1e3 * NAP_S
    assert [saving[step] for step in (0, 1, 3)] == [0, 0, 0]


def test_validation_lasts_from_the_first_forward_without_gradients_until_training_goes_on(tmp_path):
    def between(model, step):
        if step == 1:
            with torch.no_grad():
                model(torch.ones(1, 3))
            time.sleep(NAP_S)  # a metric is computed

    run = trained(tmp_path, between)
    validation = ms(run, "validation")
    assert validation[2] >= 1e3 * NAP_S
    assert ms(run, "other")[2] < 1e3 * NAP_S
    assert [validation[step] for step in (0, 1, 3)] == [0, 0, 0]


def test_data_that_is_fetched_in_a_validation_is_data(tmp_path):
    loader = DataLoader(Naps(), batch_size=2)

    def between(model, step):
        if step == 1:
            with torch.no_grad():
                for batch in loader:
                    model(batch)

    run = trained(tmp_path, between)
    assert ms(run, "data")[2] >= 4e3 * NAP_S
    assert ms(run, "validation")[2] < 1e3 * NAP_S


def test_a_teacher_that_runs_beside_the_student_is_not_validation(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).sum()
            with torch.no_grad():
                model(torch.ones(2, 3))
            loss.backward()
            optimizer.step()
    assert ms(sonde.Run(tmp_path / "run"), "validation") == [0, 0, 0]


def test_a_backward_inside_of_a_closure_is_backward_and_not_the_optimizers(tmp_path):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.register_hook(lambda gradient: time.sleep(NAP_S))
        loss.backward()
        return loss

    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
        optimizer.step(closure)
    run = sonde.Run(tmp_path / "run")
    num = run.scalar("backwards")[1][0]
    assert ms(run, "backward")[0] >= 1e3 * NAP_S * num
    assert ms(run, "optimizer")[0] < 1e3 * NAP_S * num


def test_starting_the_workers_of_a_loader_is_data_and_the_run_knows_the_loader(tmp_path):
    class Iterated(DataLoader):
        def _get_iterator(self):
            time.sleep(NAP_S)  # as new workers take it
            return super()._get_iterator()

    loader = Iterated([torch.ones(3)] * 4, batch_size=2)
    run = trained(tmp_path, lambda model, step: list(loader) if step == 0 else None)
    assert ms(run, "data")[1] >= 1e3 * NAP_S
    (event,) = [event for event in run.events("source") if event.data["call"] == "loader"]
    assert event.data["num_workers"] == 0
    assert event.data["batch_size"] == 2
    assert event.data["line"].startswith("test_step_phase_timer.py:")


def test_without_a_device_no_method_of_tensors_is_patched_and_nothing_is_brought_over(tmp_path):
    if torch.accelerator.is_available():
        pytest.skip("there is a device")
    is_patched = []
    run = trained(tmp_path, lambda model, step: is_patched.append("to" in torch.Tensor.__dict__))
    assert not any(is_patched)
    assert ms(run, "transfer") == [0, 0, 0, 0]


def test_bringing_a_tensor_over_is_a_phase_of_its_own(tmp_path):
    from sonde.capture import torch_patches

    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def slowly(tensor, device):
        time.sleep(NAP_S)
        return tensor.to(device)

    to = torch_patches._wrap_transfer(slowly)  # no device here: torch's own is a stand-in, the wrapper around it is real
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
        for _ in range(2):
            optimizer.zero_grad()
            batch = to(torch.ones(2, 3), "cpu")
            model(batch).sum().backward()
            optimizer.step()
    assert all(took >= 1e3 * NAP_S for took in ms(sonde.Run(tmp_path / "run"), "transfer")[1:])
