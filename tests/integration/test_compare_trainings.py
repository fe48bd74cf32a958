"""Real trainings side by side: what was changed between two of them is what the comparison names first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import sonde  # noqa: E402
from sonde.comparison.compare import RunComparison, compare  # noqa: E402
from sonde.events import Kind  # noqa: E402

pytestmark = pytest.mark.torch
STEPS = 40


class Net(nn.Module):
    def __init__(self, width: int = 16, drop: float = 0.0) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(8, width), nn.ReLU()
        self.drop, self.last = nn.Dropout(drop), nn.Linear(width, 2)

    def forward(self, x: Any) -> Any:
        return self.last(self.drop(self.act(self.first(x))))


def train(
    to: Path,
    *,
    seed: int = 0,
    data_seed: int = 1,
    model: dict[str, Any] | None = None,
    lr: float = 0.1,
    optimizer: str = "SGD",
    every: int | None = 1,
    disturb: Callable[[nn.Module, int], None] | None = None,
) -> None:
    torch.manual_seed(seed)
    net = Net(**(model or {}))
    chosen = getattr(torch.optim, optimizer)(net.parameters(), lr=lr)
    batches = torch.Generator().manual_seed(data_seed)
    with sonde.watch(net, chosen, to=to, every=every, strict=True):
        for step in range(STEPS):
            x = torch.randn(32, 8, generator=batches)
            loss = nn.functional.cross_entropy(net(x), (x[:, 0] > 0).long())
            chosen.zero_grad()
            loss.backward()
            if disturb is not None:
                disturb(net, step)
            chosen.step()


def nudge(model: nn.Module, step: int) -> None:
    if step == 17:
        with torch.no_grad():
            model.last.bias.grad[0] += 0.5


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunComparison]:
    """`trainings(…)`: the plain training, and one that differs from it by what is given."""
    home = tmp_path_factory.mktemp("trainings")
    train(home / "plain")
    number = iter(range(100))

    def against(**given: Any) -> RunComparison:
        path = home / f"other{next(number)}"
        train(path, **given)
        return compare(home / "plain", path)

    return against


def test_the_same_training_twice_is_the_same_to_the_last_bit(trainings: Callable[..., RunComparison]) -> None:
    found = trainings()
    assert found.parting is not None
    assert (found.parting.first, found.parting.num_both_observed) == (None, STEPS)
    assert not found.settings


def test_runs_that_observed_different_steps_are_compared_where_both_did(trainings: Callable[..., RunComparison]) -> None:
    found = trainings(every=7)
    assert found.parting is not None
    assert (found.parting.first, found.parting.num_both_observed) == (None, 6)
    assert [(one.name, one.a, one.b) for one in found.settings] == [("every", "1", "7")]


@pytest.mark.parametrize(
    "given, step, kind, where",
    [
        ({"disturb": nudge}, 17, Kind.GRADIENT, "last.bias"),
        ({"lr": 0.05}, 0, "scalar", "lr"),
        ({"optimizer": "Adagrad"}, 0, Kind.UPDATE, "first.weight"),
        ({"model": {"drop": 0.5}}, 0, Kind.ACTIVATION, "drop"),
        ({"data_seed": 2}, 0, Kind.BATCH, "input.0"),
        ({"seed": 2}, 0, Kind.PARAMETER, "first.weight"),
    ],
    ids=["one gradient", "learning rate", "optimizer", "dropout", "data", "seed"],
)
def test_what_was_changed_is_what_differs_first(
    trainings: Callable[..., RunComparison], given: dict[str, Any], step: int, kind: str, where: str
) -> None:
    parting = trainings(**given).parting
    assert parting is not None
    assert parting.first is not None
    assert (parting.first.step, parting.first.kind, parting.first.where) == (step, kind, where)
    assert parting.from_the_start == (kind in (Kind.PARAMETER, Kind.BATCH))
    assert not parting.first.by_rounding


def test_another_width_keeps_the_paths_and_changes_their_shapes(trainings: Callable[..., RunComparison]) -> None:
    found = trainings(model={"width": 24})
    assert found.sites is not None
    assert found.sites.num_only_a == found.sites.num_only_b == 0
    assert ("first.weight", (16, 8), (24, 8)) in found.sites.other_shapes


def test_too_small_a_learning_rate_ends_higher(trainings: Callable[..., RunComparison]) -> None:
    found = trainings(lr=1e-6)
    assert found.verdict == "different"
    assert "B's loss ends higher" in " ".join((found.headline, *found.details))
    assert ("lr", "0.1", "1e-06") in [(one.name, one.a, one.b) for one in found.settings]
