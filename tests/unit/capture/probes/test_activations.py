"""The recorded statistics of a layer's output are those of its real output, whatever happens to its input or output afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
from torch import Tensor, nn

import sonde
from statistics_cases import as_numpy, assert_right, reference

pytestmark = pytest.mark.torch

KINDS = {
    "ordinary": lambda: torch.randn(40, 500),
    "an odd number": lambda: torch.randn(7, 999),
    "all negative": lambda: -torch.rand(8, 64) - 1,
    "all positive and far from zero": lambda: torch.rand(8, 4096) + 1000,
    "positive ones that are tiny": lambda: torch.where(torch.rand(8, 512) < 0.5, -1.0, 1e-20),
    "zeros of both signs": lambda: torch.tensor([0.0, -0.0, 1.0, -1.0] * 50),
    "with a NaN": lambda: torch.randn(4, 300).index_fill(1, torch.tensor([7]), float("nan")),
    "with infinities": lambda: torch.tensor([float("inf"), float("-inf"), 1.0, -2.0] * 40),
    "one element": lambda: torch.tensor([[-3.0]]),
    "bfloat16": lambda: torch.randn(16, 300).bfloat16(),
    "float64": lambda: torch.randn(16, 300).double() * 1e200,
    "not contiguous": lambda: torch.randn(64, 300).t()[::3],
}


class Pair(nn.Module):
    """A leaf with an output that a test chooses, and a ReLU behind it."""

    def __init__(self, source: nn.Module, between: Callable[[Tensor], Tensor] = lambda x: x, *, inplace: bool = False) -> None:
        super().__init__()
        self.source, self.relu, self.between = source, nn.ReLU(inplace=inplace), between
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.between(self.source(x)))
        self.outputs.append(out.detach().clone())
        return out


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.to(x.dtype)


def watched(model: Pair, batches: list[Tensor], folder: Path) -> list[tuple[int, dict[str, float]]]:
    """The statistics of the ReLU's output in the run, by step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    with sonde.watch(model, optimizer, to=folder / "run", every=1, strict=True):
        for batch in batches:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    run = sonde.Run(folder / "run")
    site = next(site for site in run.sites.values() if site.kind == "output" and site.path == "relu")
    found = []
    for frame in run.frames("activation"):
        index = list(frame.sites).index(site.id)
        found.append((frame.step, dict(zip(frame.fields, frame.values[:, index].tolist()))))
    return found


def check(model: Pair, batches: list[Tensor], folder: Path) -> None:
    found = watched(model, batches, folder)
    assert [step for step, _ in found] == list(range(len(batches)))
    for (_, row), output in zip(found, model.outputs):
        assert_right(row, reference(as_numpy(output)))


@pytest.mark.parametrize("inplace", [False, True], ids=["new tensor", "in place"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_the_real_output(kind: str, inplace: bool, tmp_path: Path) -> None:
    check(Pair(Scale(), inplace=inplace), [KINDS[kind]() for _ in range(3)], tmp_path)


@pytest.mark.parametrize(
    "between",
    [lambda x: 2 * x - 1, lambda x: x.mul_(-1), lambda x: x.view_as(x), lambda x: (x * 2).neg() / 2],
    ids=["another tensor", "changed in place", "another object", "its memory used again"],
)
def test_what_comes_between_the_two_is_noticed(between: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    check(Pair(Scale(), between), [torch.randn(16, 256, requires_grad=True) for _ in range(3)], tmp_path)


def test_an_output_that_nobody_else_holds_is_not_held(tmp_path: Path) -> None:
    alive = []

    def drop(x: Tensor) -> Tensor:
        held = weakref.ref(x)
        y = x + 1
        del x
        alive.append(held)
        return y

    class Dropping(Pair):
        def forward(self, x: Tensor) -> Tensor:
            y = drop(self.source(x))
            alive.append(alive.pop()() is not None)  # type: ignore[arg-type]
            return self.relu(y)

    watched_model = Dropping(Scale())
    watched(watched_model, [torch.randn(4, 8) for _ in range(3)], tmp_path)
    assert alive == [False] * 3
