"""The tools that a session holds: the very classes of the workbench, joined to what is watched, and gone when it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import sonde  # noqa: E402

pytestmark = pytest.mark.torch

TOOLS = {
    "tensor_inspector": "TensorInspector",
    "gradient_debugger": "GradientDebugger",
    "hooks": "Hooks",
    "weight_analyzer": "WeightAnalyzer",
    "stability_checker": "StabilityChecker",
    "visualizer": "DebugVisualizer",
    "profiler": "Profiler",
}


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 5) -> None:
    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def hooks_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    return {
        "modules": sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()),
        "parameters": sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()),
        "optimizer": len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks),
    }


@pytest.mark.parametrize("attribute", TOOLS)
def test_a_session_holds_one_tool_of_each_kind(attribute: str, tmp_path: Path) -> None:
    model, optimizer = training()
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        tool = getattr(session, attribute)
        assert type(tool) is getattr(sonde, TOOLS[attribute])
        assert getattr(session, attribute) is tool


def test_a_session_that_is_asked_for_no_tool_has_no_hook_of_theirs(tmp_path: Path) -> None:
    model, optimizer = training()
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
        train(model, optimizer)
        assert hooks_on(model, optimizer) == {"modules": 0, "parameters": 0, "optimizer": 0}


def test_the_gradient_debugger_records_the_steps_from_the_first_access_on(tmp_path: Path) -> None:
    model, optimizer = training()
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        train(model, optimizer, 3)
        debugger = session.gradient_debugger
        train(model, optimizer, 4)
    assert len(debugger.flow.frames) == 4
    assert {layer.name for layer in debugger.flow.frames[-1].layers} == {"0", "2"}


def test_hooks_of_a_session_stand_on_its_model_and_may_ask_for_what_is_logged(tmp_path: Path) -> None:
    model, optimizer = training()
    calls: list[Any] = []
    hook = sonde.HookBuilder("late").trigger(sonde.HookTrigger.ON_CONDITION).when("loss < 2").layer_patterns(["0"])
    hook = hook.action(sonde.HookAction.CUSTOM_CALLBACK).callback(calls.append).build()
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        session.hooks.register_hook(hook)
        session.log(loss=3.0)
        train(model, optimizer, 2)
        assert calls == []
        session.log(loss=1.0)
        train(model, optimizer, 2)
    assert calls


def test_when_a_session_ends_its_tools_keep_their_results_and_release_the_model(tmp_path: Path) -> None:
    model, optimizer = training()
    before = hooks_on(model, optimizer)
    hook = sonde.HookBuilder("all").trigger(sonde.HookTrigger.EVERY_FORWARD).action(sonde.HookAction.INSPECT_TENSOR)
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        session.hooks.register_hook(hook.layer_patterns(["*"]).build())
        debugger = session.gradient_debugger
        train(model, optimizer)
        assert hooks_on(model, optimizer) != before
    assert hooks_on(model, optimizer) == before
    assert session.hooks.results
    assert debugger.analyze().layers


def test_pictures_of_a_session_lie_in_its_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model, optimizer = training()
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        path = session.visualizer.plot_tensor_distribution("weights", model[0].weight)
    assert path.parent == tmp_path / "run" / "pictures"
    assert sonde.Run(tmp_path / "run").damage == []
