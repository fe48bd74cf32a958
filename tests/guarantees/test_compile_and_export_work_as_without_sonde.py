"""R24: torch.compile and torch.export do what they do without us. R25: what is not seen inside of compiled code is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

import sonde

pytestmark = pytest.mark.filterwarnings(  # the compiler's own
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad attribute of a Tensor that is not a leaf"
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tanh = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tanh(self.linear(x))


class Net(nn.Module):
    """Of our own classes: torch compiles no frame of a bare nn.Sequential that is compiled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.block, self.last = nn.Linear(3, 4), nn.ReLU(), Block(), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(self.relu(self.first(x))))


def make() -> nn.Module:
    torch.manual_seed(0)
    return Net()


Compiled = Callable[[nn.Module, Any], nn.Module]


def _whole(model: nn.Module, backend: Any) -> nn.Module:
    return torch.compile(model, backend=backend)


def _fullgraph(model: nn.Module, backend: Any) -> nn.Module:
    return torch.compile(model, backend=backend, fullgraph=True)


def _in_place(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


def _in_place_fullgraph(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend, fullgraph=True)
    return model


def _regional(model: nn.Module, backend: Any) -> nn.Module:
    model.block.compile(backend=backend)
    return model


def _regional_wrapped(model: nn.Module, backend: Any) -> nn.Module:
    model.block = torch.compile(model.block, backend=backend)
    return model


WAYS: dict[str, Compiled] = {
    "torch.compile": _whole, "fullgraph": _fullgraph, "Module.compile": _in_place, "Module.compile fullgraph": _in_place_fullgraph,
    "regional": _regional, "regional wrapped": _regional_wrapped,
}  # fmt: skip


def compile_and_train(way: Compiled, when: str, to: Path | None, every: int | None = 1) -> tuple[int, int, int, list[float]]:
    """Frames, operations in them, graph breaks, and the losses."""
    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounter()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = None
    if to and when == "before":
        session = sonde.watch(model, optimizer, to=to, every=every, strict=True)
    called = way(model, counter)
    if to and when == "after":
        session = sonde.watch(called, optimizer, to=to, every=every, strict=True)
    if to and when == "late":
        losses = [_step(called, optimizer)]
        session = sonde.watch(called, optimizer, to=to, every=every, strict=True)
        losses += [_step(called, optimizer) for _ in range(5)]
    else:
        losses = [_step(called, optimizer) for _ in range(6)]
    if session is not None:
        session.close()
    return counter.frame_count, counter.op_count, sum(counters["graph_break"].values()), losses


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.ones(5, 3)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("when", ["before", "after", "late"])
@pytest.mark.parametrize("way", WAYS)
def test_r24_frames_graph_breaks_and_results_are_those_without_sonde(way: str, when: str, tmp_path: Path) -> None:
    expected = compile_and_train(WAYS[way], when, None)
    assert compile_and_train(WAYS[way], when, tmp_path / "run") == expected
    assert expected[0] >= 1


@pytest.mark.parametrize("way", ["torch.compile", "Module.compile", "regional"])
def test_r24_observing_some_steps_and_not_others_compiles_nothing_anew(way: str, tmp_path: Path) -> None:
    expected = compile_and_train(WAYS[way], "before", None)
    assert compile_and_train(WAYS[way], "before", tmp_path / "run", every=2) == expected


def test_r24_a_watched_model_can_be_exported(tmp_path: Path) -> None:
    model = make()
    x = torch.ones(5, 3)
    expected = str(torch.export.export(model, (x,)).graph)
    with sonde.watch(model, to=tmp_path / "run", every=1, strict=True):
        program = torch.export.export(model, (x,))
        assert torch.equal(program.module()(x), model(x))
    assert str(program.graph) == expected


def test_r24_a_compiled_function_around_a_watched_model_is_one_frame(tmp_path: Path) -> None:
    def train(to: Path | None) -> tuple[int, list[float]]:
        torch._dynamo.reset()
        counter = CompileCounter()
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @torch.compile(backend=counter)
        def loss_of(x: torch.Tensor) -> torch.Tensor:
            return model(x).square().mean()

        session = sonde.watch(model, optimizer, to=to, every=1, strict=True) if to else None
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = loss_of(torch.ones(5, 3))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if session is not None:
            session.close()
        return counter.frame_count, losses

    assert train(tmp_path / "run") == train(None)
    assert sonde.Run(tmp_path / "run").last_step == 3


@pytest.mark.parametrize("optimizer_in", [False, True], ids=["backward", "backward and update"])
def test_r24_a_step_that_is_compiled_as_a_whole_compiles_as_without_sonde_and_is_heard(optimizer_in: bool, tmp_path: Path) -> None:
    def train(to: Path | None) -> tuple[int, int, int, list[float]]:
        torch._dynamo.reset()
        counters.clear()
        counter = CompileCounter()
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if optimizer_in:
                optimizer.step()
            return loss.detach()

        session = sonde.watch(model, optimizer, to=to, every=1, strict=True) if to else None
        compiled = torch.compile(step, backend=counter)
        losses = []
        for _ in range(8):
            losses.append(compiled(torch.ones(5, 3)).item())
            if not optimizer_in:
                optimizer.step()
        if session is not None:
            session.close()
        return counter.frame_count, counter.op_count, sum(counters["graph_break"].values()), losses

    assert train(tmp_path / "run") == train(None)
    run = sonde.Run(tmp_path / "run")
    assert run.last_step == (4 if optimizer_in else 7)  # an update that is compiled is known by what it moves, after some patience
    # Parameters are measured around an update; where that is compiled, Sonde does not call the training healthy.
    assert sonde.diagnose(run).verdict == ("nothing_found" if optimizer_in else "healthy")


# -- R25 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after", "late"])
@pytest.mark.parametrize("way", ["torch.compile", "Module.compile"])
def test_r25_all_but_the_outputs_of_a_compiled_model_are_measured_and_that_is_said(way: str, when: str, tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True) if when == "before" else None
    called = WAYS[way](model, "aot_eager")
    if when == "late":
        _step(called, optimizer)
    session = session or sonde.watch(called, optimizer, to=tmp_path / "run", every=1, strict=True)
    for _ in range(3):
        _step(called, optimizer)
    session.close()
    run = sonde.Run(tmp_path / "run")
    for kind in ("gradient", "parameter", "update"):
        for name, p in model.named_parameters():
            assert run.series(kind, name, "num")[1].tolist() == [p.numel()] * 3, (kind, name)
    assert run.scalar("loss")[1].size == 3
    said = [event.data for event in run.events("unobserved")]
    assert len(said) == 1
    assert "compile" in said[0]["reason"]
    assert "activation" not in run.kinds


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", ["regional", "regional wrapped"])
def test_r25_layers_around_a_compiled_part_are_measured_and_the_part_is_said(way: str, when: str, tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if when == "after":
        WAYS[way](model, "aot_eager")
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        if when == "before":
            WAYS[way](model, "aot_eager")
        for _ in range(3):
            _step(model, optimizer)
    run = sonde.Run(tmp_path / "run")
    for path in ("first", "relu", "last"):
        assert run.series("activation", path, "num")[0].tolist() == [0, 1, 2]
    for inner in ("block.linear", "block.tanh"):
        assert run.series("activation", inner, "num")[0].size == 0
    assert [event.data["where"] for event in run.events("unobserved")] == ["block"]
