"""The setting `layers`: which layers and parameters are measured, and what is said about the others."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import sonde  # noqa: E402

pytestmark = pytest.mark.torch


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential()
    layers.encoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
    layers.head = nn.Linear(8, 1)
    return layers


def run_with(path: Path, watched: nn.Module, **settings: Any) -> tuple[sonde.Run, sonde.DebugSession]:
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    with sonde.watch(watched, optimizer, to=path, every=1, strict=True, **settings) as session:
        for _ in range(4):
            optimizer.zero_grad()
            watched(x).square().mean().backward()
            optimizer.step()
    return sonde.Run(path), session


def measured(run: sonde.Run) -> set[str]:
    return {site.path for site in run.sites.values() if site.kind in ("output", "parameter")}


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (["encoder.*"], {"encoder.1"} | {f"encoder.{number}{part}" for number in (0, 2) for part in ("", ".weight", ".bias")}),
        ("head", {"head", "head.weight", "head.bias"}),
        (["encoder.0", "*.bias"], {"encoder.0", "encoder.0.weight", "encoder.0.bias", "encoder.2.bias", "head.bias"}),
    ],
)
def test_only_the_chosen_layers_and_what_is_inside_of_them_are_measured(layers: Any, expected: set[str], tmp_path: Path) -> None:
    run, _ = run_with(tmp_path / "run", model(), layers=layers)
    assert measured(run) == expected


def test_the_norm_of_all_gradients_and_the_statistics_of_the_chosen_layers_are_those_of_a_run_with_all(tmp_path: Path) -> None:
    some, session = run_with(tmp_path / "some", model(), config={"layers": ["head"]})
    every, _ = run_with(tmp_path / "all", model())
    assert some.scalar("grad_norm")[1] == pytest.approx(every.scalar("grad_norm")[1], rel=1e-9)  # summed in another order
    for kind, name in (("gradient", "head.weight"), ("update", "head.bias"), ("activation", "head")):
        assert some.series(kind, name, "l2")[1].tolist() == every.series(kind, name, "l2")[1].tolist()
    (note,) = session.report().unobserved
    assert (note.where, note.reason) == ("3 layers of model", "only head was chosen by layers")


def test_a_model_that_is_one_layer_has_the_name_of_its_class(tmp_path: Path) -> None:
    run, _ = run_with(tmp_path / "run", nn.Linear(4, 1), layers=["Linear"])
    assert {site.kind for site in run.sites.values()} >= {"output"}


def test_a_pattern_without_a_layer_is_logged_with_the_nearest_names_and_is_in_the_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "sonde"):
        _, session = run_with(tmp_path / "run", model(), layers=["encodr", "head"])
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("sonde: the pattern 'encodr' matches nothing. Nearest: encoder")
    assert message.removeprefix("sonde: ") in [note.reason for note in session.report().unobserved]
