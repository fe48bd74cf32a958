"""Which modules of a model have timers: those inside a compiled part only where it runs uncompiled."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import sonde  # noqa: E402
from sonde.profiler.profile_training_loop import watch_steps  # noqa: E402

pytestmark = pytest.mark.torch


def test_a_compiled_model_is_profiled_uncompiled_with_a_note() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager")
    report = sonde.Profiler().profile(model, torch.randn(2, 4), warmup=1, repeats=1)
    assert [layer.path for layer in report.layers] == ["", "0", "1"]
    assert any("uncompiled" in note for note in report.notes)


def test_a_compiled_model_in_a_script_is_timed_as_a_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with watch_steps(num_steps=2, warmup=1) as watcher:
        compiled = torch.compile(model, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            optimizer.zero_grad()
            compiled(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    report = watcher.report()
    assert [layer.path for layer in report.layers] == [""]
    assert report.layers[0].backward.median_ms > 0
    assert any("compiled parts are timed as a whole" in note for note in report.notes)
    assert report.num_samples == 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch.compile itself
def test_a_compiled_part_is_timed_beside_uncompiled_ones() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with watch_steps(num_steps=2, warmup=1) as watcher:
        model[1] = torch.compile(model[1], backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    kinds = {layer.path: layer.kind for layer in watcher.report().layers}
    assert kinds == {"": "Sequential", "0": "Linear", "1": "OptimizedModule"}


def test_a_compiled_part_is_profiled_uncompiled_without_a_warning() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager"))
    report = sonde.Profiler().profile(model, torch.randn(2, 4), warmup=1, repeats=1)
    assert [layer.path for layer in report.layers] == ["", "0", "1", "1.0", "1.1"]


@pytest.mark.needs_bfloat16("linear")
def test_autocast_is_in_the_environment_of_the_report() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.layer(x)

    with torch.autocast("cpu", torch.bfloat16):
        report = sonde.Profiler().profile(Cast(), torch.randn(2, 4), warmup=1, repeats=1)
    assert report.environment["dtype"] == "float32 with autocast to bfloat16"
