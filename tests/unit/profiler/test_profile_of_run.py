"""The times of a run as a profile."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import sonde  # noqa: E402
from sonde.events import StepProfile  # noqa: E402

pytestmark = pytest.mark.torch


def test_a_profile_of_a_run_has_phases_of_all_steps_and_layers_of_the_steps_measured_in_detail(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        for step in range(20):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if step > 16:
                layer = {"path": "0", "type": "Linear", "num": 2, "forward_ms": float(step), "backward_ms": 2.0 * step}
                rows = StepProfile(reason="asked", lines=[], waits=[], layers=[layer], machine={}, fetch_ms=0.0, fetch_cpu_ms=0.0)
                session.emit(rows)
    report = sonde.Profiler.from_run(tmp_path / "run").report()
    (layer_cost,) = report.layers
    assert (layer_cost.path, layer_cost.kind, layer_cost.calls) == ("0", "Linear", 2)
    assert (layer_cost.forward.median_ms, layer_cost.backward.median_ms) == (18.0, 36.0)
    assert report.title == "Sequential"
    steps, own = (sonde.Run(tmp_path / "run").scalar(name)[1] for name in ("step_ms", "sonde_ms"))
    assert min(steps - own) <= report.step.median_ms <= max(steps - own)
    assert {"forward", "backward", "optimizer"} <= report.phases.keys()
    assert "layers: 3 steps that the session measured in detail" in " ".join(report.notes)


def test_a_run_without_steps_has_no_profile(tmp_path: Path) -> None:
    sonde.DebugSession(to=tmp_path / "run", strict=True).start().close()
    with pytest.raises(sonde.SondeError, match="nothing was measured"):
        sonde.Profiler.from_run(tmp_path / "run").report()
