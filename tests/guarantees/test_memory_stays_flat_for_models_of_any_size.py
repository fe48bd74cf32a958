"""R62: memory stays flat over any number of steps. R63: models of any size and shape can be watched."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sonde
from model_examples import BY_NAME, PROGRAMS, Program
from training_harness import watched

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def num_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def one_step(program: Program, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    program.loss(model).backward()
    optimizer.step()


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_r62_the_number_of_tensors_does_not_grow_even_without_garbage_collection(program: Program, tmp_path: Path) -> None:
    model = program.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    gc.collect()
    gc.disable()
    try:
        with watched(tmp_path)(model, optimizer):
            for _ in range(20):
                one_step(program, model, optimizer)
            before = num_tensors()
            for _ in range(20):
                one_step(program, model, optimizer)
            assert num_tensors() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("every", [1, None], ids=["every step", "default"])
def test_r62_outputs_and_losses_are_dead_when_their_step_ends(every: int | None, tmp_path: Path) -> None:
    program = BY_NAME["residual"]
    model = program.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    alive: list[weakref.ref[Any]] = []
    for module in model.modules():
        module.register_forward_hook(lambda _m, args, out: alive.extend(weakref.ref(t) for t in (out, *args)))
    gc.disable()
    try:
        with watched(tmp_path, every=every)(model, optimizer):
            for _ in range(5):
                optimizer.zero_grad()
                loss = program.loss(model)
                alive.append(weakref.ref(loss))
                loss.backward()
                del loss
                optimizer.step()
                assert len(alive) > 5
                assert [ref for ref in alive if ref() is not None] == []
                alive.clear()
    finally:
        gc.enable()


def test_r62_a_closed_session_keeps_neither_the_model_nor_its_optimizer_alive(tmp_path: Path) -> None:
    model, optimizer = BY_NAME["mlp"].build(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True)
    one_step(BY_NAME["mlp"], model, optimizer)
    session.close()
    refs = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight)]
    del model, optimizer, session
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


def test_r62_the_memory_of_the_process_is_flat_over_many_thousand_steps(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    x = torch.ones(2, 4)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=7, strict=True) as session:
        sizes = []
        for step in range(8_000):
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log(extra=loss)
            if step in (2_000, 7_999):
                gc.collect()
                sizes.append(resident_bytes())
    # the promise is 1 MB in 100,000 steps; an allocator may round by a few pages
    assert sizes[1] - sizes[0] < 2 * 2**20, sizes
    assert sonde.Run(tmp_path / "run").last_step == 7_999


def test_r62_models_made_and_dropped_without_end_do_not_pile_up(tmp_path: Path) -> None:
    """Under a session that finds models by itself, each round trains a new one."""
    session = sonde.DebugSession(sonde.DebugConfig(every=1), to=tmp_path / "run", strict=True).start()
    refs = []
    for _ in range(60):
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        refs.append(weakref.ref(model))
    del model, optimizer
    gc.collect()
    assert sum(ref() is not None for ref in refs) <= 1
    session.close()
    assert sonde.Run(tmp_path / "run").scalar("optimizer_steps")[1].sum() == 120


# -- R63 -------------------------------------------------------------------------------------------


class CountsHooks(nn.Module):
    """Knows how often hooks were put on it."""

    total = 0

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        CountsHooks.total += 1
        return super().register_forward_hook(*args, **kwargs)


def test_r63_a_model_of_five_thousand_modules_is_watched_with_work_in_proportion(tmp_path: Path) -> None:
    class Tiny(CountsHooks):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    CountsHooks.total = 0
    model = nn.Sequential(*[Tiny() for _ in range(5000)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True)
    assert not any(module._forward_hooks for module in model.modules())  # nothing is on the modules
    model(torch.ones(1)).sum().backward()
    assert CountsHooks.total == 0  # leaves are measured by one hook on all modules
    assert not any(module._forward_hooks for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())  # and nothing is left in its place
    optimizer.step()
    session.close()
    run = sonde.Run(tmp_path / "run")
    for kind in ("activation", "activation_gradient", "gradient", "parameter", "update"):
        (frame,) = run.frames(kind)
        assert len(frame.sites) == 5000, kind
    assert sum(path.stat().st_size for path in (tmp_path / "run").iterdir()) < 20 * 2**20


def test_r63_a_model_of_depth_one_thousand_can_be_watched(tmp_path: Path) -> None:
    model: nn.Module = nn.Linear(2, 1)
    for _ in range(1000):
        model = nn.Sequential(model)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)  # as whoever trains such a model must
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
    finally:
        sys.setrecursionlimit(limit)
    run = sonde.Run(tmp_path / "run")
    assert run.last_step == 1
    (weight, bias) = (site for site in run.sites.values() if site.kind == "parameter")
    assert weight.path != bias.path
    (frame, _) = run.frames("activation")
    assert len(frame.sites) == 1


def test_r63_names_of_a_hundred_thousand_characters_are_capped_and_stay_apart(tmp_path: Path) -> None:
    model = nn.Module()
    left, right = "n" * 100_000 + "left", "n" * 100_000 + "right"
    model.add_module(left, nn.Linear(2, 2))
    model.add_module(right, nn.Linear(2, 2))
    model.forward = lambda x: getattr(model, right)(getattr(model, left)(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    run = sonde.Run(tmp_path / "run")
    paths = [site.path for site in run.sites.values() if site.kind == "parameter"]
    assert len(set(paths)) == 4
    assert max(map(len, paths)) <= 1100
    assert sum(path.stat().st_size for path in (tmp_path / "run").iterdir()) < 2**20


HOSTILE = [
    "<img src=x onerror=alert(1)>", "__proto__", "new\nline",
    "\x1b[31mred", "\u202eright to left", "\ud800", "\x00", "ünïcödé 模型", "a b", "'\"",
    "--help",
]  # fmt: skip


def test_r63_names_that_torch_allows_are_written_and_read_back_as_they_are(tmp_path: Path) -> None:
    model = nn.Sequential()
    for name in HOSTILE:
        model.add_module(name, nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    run = sonde.Run(tmp_path / "run")
    for name in HOSTILE:
        assert run.series("gradient", f"{name}.weight", "num")[1].tolist() == [4], name
