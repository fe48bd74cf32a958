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


def test_conditions_of_hooks_know_the_loss_that_the_session_watches(tmp_path: Path) -> None:
    model, optimizer = training()
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        fired: list[tuple[int, float]] = []
        for name, layer in (("step", ()), ("layer", ("2",))):
            hook = sonde.HookBuilder(name).when("loss > 0").callback(lambda event: fired.append((event.step, event.values["loss"])))
            session.hooks.register_hook((hook.layer_patterns(layer) if layer else hook).build())
        session.hooks.register_hook(sonde.HookBuilder("epoch").when("epoch > 0").alert("info").build())
        train(model, optimizer, 2)
        first, second = sonde.Run(session.run).scalar("loss")[1]
        # In step 1 the layer runs before the loss of that step is known.
        assert fired == [(0, first), (1, first), (1, second)]
        session.log(loss=7.0)  # what the user logs is used instead
        train(model, optimizer, 1)
        assert fired[-1] == (2, 7.0)
        assert "no value for epoch (pass it before the optimizer step: hooks.log(epoch=…))" in str(list(session.hooks.status().values())[2])


def test_hooks_of_a_session_count_steps_also_with_several_optimizers(tmp_path: Path) -> None:
    model, _ = training()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in (model[0], model[2])]
    with sonde.watch(model, optimizers, to=tmp_path / "run", strict=True) as session:
        steps: list[int] = []
        session.hooks.register_hook(sonde.HookBuilder("loss").when("loss > 0").callback(lambda event: steps.append(event.step)).build())
        for _ in range(3):
            model(torch.ones(2, 4)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        assert steps == [0, 1, 2]


def test_hooks_of_a_session_get_an_optimizer_that_is_made_later(tmp_path: Path) -> None:
    model, _ = training()
    with sonde.watch(model, to=tmp_path / "run", strict=True) as session:
        steps: list[int] = []
        session.hooks.register_hook(sonde.HookBuilder("loss").when("loss > 0").callback(lambda event: steps.append(event.step)).build())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        train(model, optimizer, 4)
        assert steps == [0, 1, 2]  # from the second step on
    assert hooks_on(model, optimizer) == {"modules": 0, "parameters": 0, "optimizer": 0}


def test_hooks_of_a_session_that_finds_its_model_later_run_on_it(tmp_path: Path) -> None:
    with sonde.DebugSession({"level": "basic"}, to=tmp_path / "run", strict=True) as session:
        session.hooks.register_hook(sonde.HookBuilder("loss").when("loss > 0").alert("info").build())
        session.hooks.register_hook(sonde.HookBuilder("layer").trigger("every_forward").action("inspect_tensor").layer_patterns("2").build())
        model, optimizer = training()
        before = hooks_on(model, optimizer)
        train(model, optimizer, 4)
        assert [state.executions for state in session.hooks.status().values()] == [3, 3]  # from the second step on
    assert hooks_on(model, optimizer) == before


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


def test_a_threshold_for_memory_is_logged_recorded_judged_and_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = training()
    config = {"memory_threshold_mb": 1.0, "memory_threshold_share": 0.99}
    with sonde.watch(model, optimizer, to=tmp_path / "run", config=config, strict=True) as session:
        session.memory_profiler.snapshot("start")
        train(model, optimizer, 3)
        assert "more than memory_threshold_mb=1 allows (1 MiB)" in session.memory_profiler.report().notes[0]
    (message,) = [record.getMessage() for record in caplog.records if "memory" in record.getMessage()]
    assert "in step 0, more than memory_threshold_mb=1 allows (1 MiB)" in message
    (finding,) = [finding for finding in sonde.diagnose(tmp_path / "run").findings if finding.rule == "memory-growth"]
    assert "memory_threshold_mb=1" in finding.cause
    with pytest.raises(sonde.SondeError, match="memory_threshold_share"):
        sonde.MemoryProfiler(memory_threshold_share=2.0)
