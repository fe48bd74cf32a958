"""PyTorchDebugger: its numbers equal those of torch, the training is unchanged to the last bit, and the report has its fixed keys."""

from __future__ import annotations

import copy
import json
import logging
import math
from datetime import datetime
from statistics import fmean
from time import perf_counter

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import model_examples  # noqa: E402
import sonde  # noqa: E402
from sonde import DebugConfig, DebugInfo, NonFiniteError, PyTorchDebugger, PyTorchDebugManager, SondeError  # noqa: E402
from sonde.tools.loop_debugger import batch_log_file  # noqa: E402
from sonde.tools.loop_debugger.find_nan_operation import anomaly_mode  # noqa: E402
from sonde.tools.loop_debugger.operation_history import GradientNorms, OperationHistory  # noqa: E402

pytestmark = pytest.mark.torch
KEYS = {"loss", "gradient_norm", "param_norm", "cpu_memory", "gpu_memory", "execution_time"}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def batch(num: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(num, 6)
    return x, x.sum(1, keepdim=True)


def debugger(tmp_path, **settings) -> PyTorchDebugger:
    return PyTorchDebugger(DebugConfig(output_dir=str(tmp_path), **settings))


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(model_examples.mlp().parameters(), lr=0.1)


def trained(tmp_path, steps: int = 20) -> PyTorchDebugger:
    tool, model = debugger(tmp_path), model_examples.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        tool.debug_training_step(model, optimizer, F.mse_loss, *batch(), 0, step)
    return tool


# ---- numbers


def test_a_step_gives_the_six_numbers_and_each_agrees_with_torch(tmp_path):
    tool, model = debugger(tmp_path), model_examples.mlp()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, twin)]
    for _ in range(3):
        x, y = batch()
        found = tool.debug_training_step(model, optimizers[0], F.mse_loss, x, y)
        optimizers[1].zero_grad()
        loss = F.mse_loss(twin(x), y)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in twin.parameters()])
        optimizers[1].step()
        assert set(found) == KEYS
        assert found["loss"] == loss.item()
        assert found["gradient_norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert found["param_norm"] == pytest.approx(torch.nn.utils.get_total_norm(list(twin.parameters())).item(), rel=1e-5)
        assert found["gpu_memory"] == 0.0


@pytest.mark.parametrize("name", ["conv", "transformer", "tied", "parametrized", "checkpointed"])
def test_training_is_the_same_to_the_last_bit(name, tmp_path):
    program = model_examples.BY_NAME[name]
    models = [program.build()]
    models.append(copy.deepcopy(models[0]))
    tool = debugger(tmp_path)
    ends = []
    for index, model in enumerate(models):
        torch.manual_seed(3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            loss = program.loss(model)
            if index:
                tool.debug_backward_pass(loss, model)
                tool.debug_optimization_step(optimizer, model)
            else:
                loss.backward()
                optimizer.step()
        ends.append((model.state_dict(), torch.get_rng_state()))
    assert all(torch.equal(value, ends[1][0][key]) for key, value in ends[0][0].items())
    assert torch.equal(ends[0][1], ends[1][1])


def test_a_whole_step_with_dropout_and_batch_norm_is_the_same_to_the_last_bit_even_when_it_is_bad(tmp_path):
    ends = []
    for debugged in (False, True):
        torch.manual_seed(5)
        model, tool = model_examples.conv(), debugger(tmp_path)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for step in range(4):
            x, y = torch.randn(4, 3, 6, 6), torch.randn(4, 1)
            if step == 2:
                x[1, 0, 0, 0] = math.inf
            if debugged:
                tool.debug_training_step(model, optimizer, F.mse_loss, x, y)
            else:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
        ends.append([*model.state_dict().values(), *(p.grad for p in model.parameters()), torch.get_rng_state()])
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(*ends))


def test_sparse_gradients_count_with_all_others(tmp_path):
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1))
    norm = debugger(tmp_path).debug_backward_pass(model(torch.tensor([[1, 2], [2, 2]])).sum(), model)
    whole = math.sqrt(sum(float(p.grad.to_dense().square().sum()) for p in model.parameters()))
    assert norm == pytest.approx(whole, rel=1e-6)


def test_the_time_of_a_block_is_its_own_time(tmp_path):
    tool = debugger(tmp_path)
    before = perf_counter()
    with tool.debug_context("block", "net", epoch=2, batch=7) as info:
        began = perf_counter()
        sum(range(20_000))
        inside = perf_counter() - began
    around = perf_counter() - before
    assert inside <= info.execution_time <= around
    assert (info.operation, info.model_name, info.epoch, info.batch) == ("block", "net", 2, 7)


def test_what_is_inside_takes_no_longer_than_the_whole(tmp_path):
    infos = trained(tmp_path, 5).debug_history
    wholes = [info.execution_time for info in infos if info.operation == "training_step"]
    parts = [info.execution_time for info in infos if info.inside == "training_step"]
    assert len(wholes) == 5
    assert len(parts) == 20
    assert sum(parts) <= sum(wholes)


@pytest.mark.timing  # memory of the whole process: nothing else may be in it
def test_memory_follows_what_the_block_keeps(tmp_path):
    tool = debugger(tmp_path)
    with tool.debug_context("before") as before:
        pass
    with tool.debug_context("after") as after:
        held = np.ones(80 * 2**20, np.uint8)
    assert 70 <= after.memory_usage - before.memory_usage <= 100
    del held


def test_the_report_has_the_memory_of_parameters_gradients_and_optimizer_state(tmp_path):
    tool, model = debugger(tmp_path), nn.Linear(512, 512)
    optimizer = torch.optim.Adam(model.parameters())
    tool.debug_training_step(model, optimizer, F.mse_loss, torch.randn(4, 512), torch.randn(4, 512))
    memory = tool.create_debug_report()["details"]["memory"]
    size = sum(p.nbytes for p in model.parameters()) / 2**20
    assert memory["tensors"]["parameters"] == pytest.approx(size)
    assert memory["tensors"]["gradients"] == pytest.approx(size)
    assert memory["tensors"]["optimizer_state"] == pytest.approx(2 * size, rel=1e-3)
    assert 0 < memory["cpu"]["last"] <= memory["process"]["peak"]


def test_memory_usage_returns_process_and_gpu_memory_and_is_an_operation(tmp_path):
    tool = debugger(tmp_path)
    cpu, gpu = tool.debug_memory_usage(epoch=2, batch=3)
    assert cpu == pytest.approx(tool.memory_history[-1], rel=0.2)
    assert gpu == 0.0
    assert (tool.debug_history[-1].operation, tool.debug_history[-1].epoch, tool.debug_history[-1].batch) == ("memory_usage", 2, 3)


def test_forward_gives_what_the_model_gives(tmp_path):
    model, (x, _) = model_examples.mlp(), batch()
    assert torch.equal(debugger(tmp_path).debug_forward_pass(model, x), model(x))
    assert torch.equal(debugger(tmp_path).debug_forward_pass(model, (x,)), model(x))
    assert torch.equal(debugger(tmp_path).debug_forward_pass(model, {"input": x}), model(x))


def test_inference_is_in_eval_mode_and_leaves_the_mode_and_the_random_state(tmp_path):
    model = model_examples.conv()
    model[0].eval()
    x, state = torch.randn(4, 3, 6, 6), torch.get_rng_state()
    found = debugger(tmp_path).debug_model_inference(model, x)
    assert torch.equal(state, torch.get_rng_state())
    assert [module.training for module in model] == [False, True, True, True, True, True]
    assert torch.equal(found["output"], copy.deepcopy(model).eval()(x))
    assert not found["output"].requires_grad
    assert found["samples_per_second"] == pytest.approx(4 / found["execution_time"])


def test_a_closure_of_an_optimizer_is_called(tmp_path):
    model, (x, y) = nn.Linear(6, 1), batch()
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    debugger(tmp_path).debug_optimization_step(optimizer, model, closure=closure)
    assert F.mse_loss(model(x), y) < 0.01


def test_performance_returns_the_seconds_of_the_last_operation_of_a_name_and_times_a_callable(tmp_path):
    tool, calls = debugger(tmp_path), []

    def load():
        calls.append(1)

    seconds = tool.debug_performance(load, epoch=1, batch=4)
    assert calls == [1]
    assert seconds == tool.debug_history[-1].execution_time == tool.debug_performance("load")
    assert (tool.debug_history[-1].epoch, tool.debug_history[-1].batch) == (1, 4)
    tool.debug_performance(load)
    assert tool.debug_performance("load") == tool.debug_history[-1].execution_time
    with pytest.raises(SondeError, match="load"):
        tool.debug_performance("laod")
    with pytest.raises(SondeError, match="There are none"):
        debugger(tmp_path).debug_performance("load")


# ---- anomaly mode, settings, checks


@pytest.mark.parametrize("enabled, check_nan", [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("fails", [False, True])
def test_the_anomaly_mode_is_the_users_own_afterwards(enabled, check_nan, fails):
    with torch.autograd.set_detect_anomaly(enabled, check_nan):
        try:
            with anomaly_mode(check_nan=False):
                assert torch.is_anomaly_enabled()
                if fails:
                    raise KeyError("user")
        except KeyError:
            pass
        assert (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) == (enabled, check_nan)


def test_mode_anomaly_detection_enables_the_anomaly_mode_of_torch_inside_operations_only(tmp_path):
    tool = debugger(tmp_path, mode="anomaly_detection")
    is_enabled = []

    def work():
        is_enabled.append(torch.is_anomaly_enabled())
        raise KeyError

    with pytest.raises(KeyError), tool.debug_context("outer"):
        tool.debug_performance(work)
    assert is_enabled == [True]
    assert not torch.is_anomaly_enabled()
    with debugger(tmp_path).debug_context("cheap"):
        assert not torch.is_anomaly_enabled()


class Root(nn.Module):
    """Its gradient is 0 * infinity at a zero, while its value is fine."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt((x @ self.weight) ** 2)


@pytest.mark.filterwarnings("ignore:Error detected in")  # torch says where the forward was, as a warning
def test_a_nan_gradient_found_by_torch_stops_the_step_with_the_same_error(tmp_path):
    tool, model = debugger(tmp_path, mode="anomaly_detection", anomaly_detection_mode="raise"), Root()
    with pytest.raises(NonFiniteError, match="returned nan values"):
        tool.debug_training_step(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, *batch())
    assert not model.weight.any()
    assert not torch.is_anomaly_enabled()


def test_the_users_own_anomaly_mode_raises_what_the_user_expects(tmp_path):
    model = Root()
    with torch.autograd.set_detect_anomaly(True), pytest.warns(UserWarning, match="Error detected"), pytest.raises(RuntimeError):
        debugger(tmp_path).debug_training_step(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, *batch())


def test_each_mode_and_level_changes_what_is_measured(tmp_path):
    def found(**settings):
        tool, model = debugger(tmp_path, **settings), model_examples.mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = batch()
        tool.debug_backward_pass(F.mse_loss(tool.debug_forward_pass(model, x), y), model)
        tool.debug_optimization_step(optimizer, model)
        details = tool.create_debug_report()["details"]
        has_update = bool(tool.debug_history) and tool.debug_history[-1].update_norm > 0
        return len(tool.debug_history), "layer_norms" in details["gradients"], bool(details["memory"].get("tensors")), has_update

    assert found(mode="none") == (0, False, False, False)
    assert found(mode="anomaly_detection") == (3, False, False, False)
    assert found(mode="gradient_checking") == (3, True, False, False)
    assert found(mode="gradient_checking", level="basic") == (3, False, False, False)
    assert found(mode="gradient_checking", level="advanced") == (3, True, False, True)
    assert found(mode="memory_profiling") == (3, False, True, False)
    assert found(mode="full_debug", level="advanced") == (3, True, True, True)


def test_the_update_is_what_the_parameters_moved(tmp_path):
    tool, model = debugger(tmp_path, level="advanced"), model_examples.mlp()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch()
    tool.debug_backward_pass(F.mse_loss(model(x), y), model)
    norm = tool.debug_optimization_step(optimizer, model)
    info = tool.debug_history[-1]
    moved = torch.nn.utils.get_total_norm([p.detach() - old for p, old in zip(model.parameters(), before)]).item()
    assert norm == info.param_norm
    assert info.learning_rate == 0.1
    assert info.update_norm == pytest.approx(moved, rel=1e-5)
    assert info.update_ratio == pytest.approx(moved / norm, rel=1e-5)


def test_a_debugged_step_leaves_the_anomaly_mode_on(tmp_path):
    with torch.autograd.set_detect_anomaly(True):
        trained(tmp_path, 1)
        assert torch.is_anomaly_enabled()


def test_settings_that_act_in_sessions_only_are_named(tmp_path, caplog):
    debugger(tmp_path, debug_memory_usage=True, layers=["head"], memory_threshold_mb=10)
    assert "PyTorchDebugger does not use debug_memory_usage, layers, memory_threshold_mb: sonde.watch(model, config=…) does." in caplog.text
    caplog.clear()
    debugger(tmp_path, level="expert", save_debug_info=True)
    assert not caplog.records


def test_a_report_on_nothing_has_every_key_and_no_average(tmp_path):
    report = debugger(tmp_path).create_debug_report()
    check_keys(report)
    assert report["performance_analysis"]["average_execution_time"] is None
    assert report["memory_analysis"]["average_memory_usage"] is None
    assert report["gradient_analysis"] == {"average_gradient_norm": None, "max_gradient_norm": None, "gradient_anomalies": 0}
    assert report["operation_breakdown"] == {}
    assert report.is_empty
    assert "nothing recorded: wrap the operations of the loop" in str(report)
    assert "nothing recorded: the mode is 'none'" in str(PyTorchDebugger({"mode": "none"}).create_debug_report())
    assert debugger(tmp_path).create_debug_plots().stat().st_size > 1000


@pytest.mark.timing  # memory of the whole process: nothing else may be in it
def test_memory_that_grows_is_a_leak_and_memory_that_is_given_back_is_none(tmp_path):
    for leaks in (False, True):
        tool, leaked = debugger(tmp_path), []
        for _ in range(64):
            with tool.debug_context("step") as info:
                block = np.ones(2**20, np.uint8)
                if leaks:
                    leaked.append(block)
        assert info.memory_leak_detected is leaks, info.notes
        report = tool.create_debug_report()
        assert report["details"]["memory"]["leak_detected"] is leaks
        assert report["summary"]["memory_leaks_detected"] == leaks


def history_of(times_ms: list[float], cpu_ms: float | None = None) -> list[DebugInfo]:
    history = OperationHistory(lambda kind, sentence: None)
    for number, ms in enumerate(times_ms):
        info = DebugInfo(datetime.now().astimezone(), sonde.DebugMode.FULL_DEBUG, sonde.DebugLevel.BASIC, "step", number=number)
        info.execution_time = ms / 1e3
        history.add(info, cpu_s=None if cpu_ms is None or number != len(times_ms) - 1 else cpu_ms / 1e3)
    return list(history.infos)


@pytest.mark.parametrize("usual_ms", [0.01, 1.0, 3000.0])
def test_slow_is_what_is_slow_beside_the_same_operation_whatever_its_scale(usual_ms):
    times = [usual_ms * (1 + 0.1 * (i % 5)) for i in range(60)]
    assert not any(info.performance_issue_detected for info in history_of([*times, 1.8 * usual_ms]))
    assert history_of([*times, 10 * usual_ms])[-1].performance_issue_detected
    assert not history_of([*times, 10 * usual_ms], cpu_ms=usual_ms)[-1].performance_issue_detected  # another program had the processor


def test_warn_goes_on_and_raise_stops_before_the_update(tmp_path, caplog):
    x, y = batch()
    x[3, 2] = math.nan
    for mode in ("warn", "raise"):
        model = model_examples.mlp()
        before = copy.deepcopy(model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tool = debugger(tmp_path, anomaly_detection_mode=mode)
        if mode == "warn":
            found = tool.debug_training_step(model, optimizer, F.mse_loss, x, y)
            assert math.isnan(found["loss"])
            assert math.isnan(found["param_norm"])
            assert "the loss is NaN" in caplog.text
            assert "cause: " in caplog.text
            assert "1 NaN" in next(note for note in tool.create_debug_report()["details"]["notes"] if "cause: " in note)
        else:
            with pytest.raises(NonFiniteError, match="before the update") as caught:
                tool.debug_training_step(model, optimizer, F.mse_loss, x, y)
            assert caught.value.origin.phase == "input"
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert tool.debug_history[-1].anomaly_detected


class Logarithm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(torch.relu(self.fc(x)))


def test_a_bad_step_is_traced_to_the_operation_that_made_it(tmp_path):
    tool, model = debugger(tmp_path), Logarithm()
    tool.debug_training_step(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, *batch())
    assert any(note.startswith("cause: log") and "zero" in note for note in tool.debug_history[-1].notes), tool.debug_history[-1].notes


def test_an_exception_of_the_user_passes_through_and_is_counted(tmp_path):
    tool, error = debugger(tmp_path), KeyError("mine")
    with pytest.raises(KeyError) as caught, tool.debug_context("load"):
        raise error
    assert caught.value is error
    assert tool.debug_history[-1].error == "KeyError: 'mine'"
    assert tool.debug_history[-1].anomaly_detected
    assert tool.create_debug_report()["details"]["num_errors"] == 1
    assert tool.create_debug_report()["summary"]["anomalies_detected"] == 1


# ---- report, picture, log, session


REPORT_KEYS = {
    "summary": {
        "total_debug_operations", "anomalies_detected", "memory_leaks_detected", "performance_issues_detected", "debug_mode", "debug_level",
    },
    "performance_analysis": {"average_execution_time", "max_execution_time", "min_execution_time"},
    "memory_analysis": {"average_memory_usage", "max_memory_usage", "average_gpu_memory", "max_gpu_memory"},
    "gradient_analysis": {"average_gradient_norm", "max_gradient_norm", "gradient_anomalies"},
}  # fmt: skip


def check_keys(report) -> None:
    assert set(report) == {"summary", "performance_analysis", "memory_analysis", "gradient_analysis", "operation_breakdown", "details"}
    assert {name: set(report[name]) for name in REPORT_KEYS} == REPORT_KEYS


def test_the_report_has_its_fixed_keys_and_agrees_with_the_histories(tmp_path):
    tool = trained(tmp_path)
    report = tool.create_comprehensive_report()
    check_keys(report)
    steps = [info for info in tool.debug_history if info.operation == "training_step"]
    assert report["summary"] == {
        "total_debug_operations": 100, "anomalies_detected": 0, "memory_leaks_detected": 0,
        "performance_issues_detected": report["summary"]["performance_issues_detected"],  # depends on the machine
        "debug_mode": "full_debug", "debug_level": "intermediate",
    }  # fmt: skip
    assert tool.performance_history == [info.execution_time for info in steps]
    assert tool.memory_history == [info.memory_usage for info in steps]
    assert tool.gradient_history == [info.gradient_norm for info in steps]
    times, memory, norms = tool.performance_history, tool.memory_history, tool.gradient_history
    assert report["performance_analysis"] == {
        "average_execution_time": pytest.approx(fmean(times)), "max_execution_time": max(times), "min_execution_time": min(times),
    }  # fmt: skip
    assert report["memory_analysis"] == {
        "average_memory_usage": pytest.approx(fmean(memory)), "max_memory_usage": max(memory),
        "average_gpu_memory": 0.0, "max_gpu_memory": 0.0,
    }  # fmt: skip
    assert report["gradient_analysis"] == {
        "average_gradient_norm": pytest.approx(fmean(norms)), "max_gradient_norm": max(norms), "gradient_anomalies": 0,
    }  # fmt: skip
    names = ("training_step", "forward_pass", "loss", "backward_pass", "optimization_step")
    assert report["operation_breakdown"] == dict.fromkeys(names, 20)


def test_the_details_of_the_report_have_losses_layers_and_times_by_operation(tmp_path):
    tool = trained(tmp_path)
    report = tool.create_debug_report()
    details = report["details"]
    assert details["num_training_steps"] == 20
    assert details["last_loss"] == tool.debug_history[-1].loss
    assert set(details["gradients"]["layer_norms"]) == {"0", "2", "4"}
    assert (details["operations"]["training_step"]["calls"], details["operations"]["training_step"]["share"]) == (20, 1.0)
    assert max(map(len, str(report).splitlines())) <= 80
    assert "optimization_step" in report._repr_html_()


def test_the_report_of_a_bad_run_is_strict_json(tmp_path):
    tool, model = debugger(tmp_path), model_examples.mlp()
    x, y = batch()
    tool.debug_training_step(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, x * math.inf, y)
    document = json.loads(tool.create_debug_report().to_json(), parse_constant=lambda name: pytest.fail(name))
    assert document["details"]["last_loss"] == "NaN"
    assert document["gradient_analysis"]["average_gradient_norm"] is None
    assert document["gradient_analysis"]["gradient_anomalies"] == 1


def test_the_picture_has_four_panels_with_every_number_in_it(tmp_path):
    tool = trained(tmp_path, 6)
    x, y = batch()
    model = model_examples.mlp()
    tool.debug_training_step(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, x * math.nan, y)
    path = tool.create_debug_plots(tmp_path / "loop.json")
    panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
    assert list(panels) == ["execution time", "memory", "gradient norm", "anomalies"]
    assert panels["gradient norm"]["series"]["gradient norm"]["values"][:6] == tool.gradient_history[:6]
    assert panels["memory"]["series"]["process"]["values"] == tool.memory_history
    assert "training_step" in panels["execution time"]["series"]
    assert panels["anomalies"]["events"] == {"not finite": [6.0]}
    assert tool.create_debug_plots() == tmp_path / "debug_analysis.png"


def test_clear_discards_the_recorded_operations_and_keeps_the_training_log(tmp_path, capsys):
    manager = PyTorchDebugManager(DebugConfig(output_dir=str(tmp_path)))
    manager.setup_training_logging("net")
    model = model_examples.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch()
    manager.debug_training_step(model, optimizer, F.mse_loss, x * math.nan, y)
    manager.clear()
    assert (manager.debug_history, manager.memory_history, manager.performance_history, manager.gradient_history) == ([], [], [], [])
    report = manager.create_debug_report()
    assert report.is_empty
    assert report["summary"]["anomalies_detected"] == 0
    assert report["details"]["gradients"] == {}
    manager.debug_training_step(model_examples.mlp(), sgd(), F.mse_loss, x, y)
    assert [info.number for info in manager.debug_history] == [0] * 5
    manager.close()
    assert (tmp_path / "net.log").read_text(encoding="utf-8").count("loss=") == 2


def test_with_nothing_recorded_an_existing_picture_is_not_replaced(tmp_path):
    path = trained(tmp_path, 3).create_debug_plots()
    before = path.read_bytes()
    assert debugger(tmp_path).create_debug_plots() == path
    assert path.read_bytes() == before


# ---- names and values of the manager


def test_the_manager_has_the_debugger_the_loggers_the_histories_and_the_flags(tmp_path):
    manager = PyTorchDebugManager(DebugConfig(output_dir=str(tmp_path), mode="gradient_checking"))
    assert isinstance(manager.debugger, PyTorchDebugger)
    assert isinstance(manager.logger, logging.Logger)
    assert manager.training_logger is None
    tool = manager.debugger
    assert (tool.debug_history, tool.memory_history, tool.performance_history, tool.gradient_history) == ([], [], [], [])

    def flags(mode: str) -> list[bool]:
        tool = debugger(tmp_path, mode=mode)
        return [
            tool.anomaly_detection_active, tool.gradient_checking_active, tool.memory_profiling_active, tool.performance_profiling_active,
        ]  # fmt: skip

    assert flags("none") == [False] * 4
    assert flags("full_debug") == [True] * 4
    for index, mode in enumerate(("anomaly_detection", "gradient_checking", "memory_profiling", "performance_profiling")):
        assert flags(mode) == [i == index for i in range(4)]


def test_epoch_and_batch_are_positional_and_the_results_are_numbers(tmp_path):
    tool, model = debugger(tmp_path), model_examples.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch()
    output = tool.debug_forward_pass(model, x, 2, 5)
    norm = tool.debug_backward_pass(F.mse_loss(output, y), model, 2, 5)
    assert norm == pytest.approx(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item(), rel=1e-5)
    param_norm = tool.debug_optimization_step(optimizer, model, 2, 5)
    assert param_norm == pytest.approx(torch.nn.utils.get_total_norm(list(model.parameters())).item(), rel=1e-5)
    tool.debug_memory_usage(2, 5)
    tool.debug_performance(batch, 2, 5)
    assert {type(value) for value in (norm, param_norm)} == {float}
    assert [(info.epoch, info.batch) for info in tool.debug_history] == [(2, 5)] * 5


def test_values_are_numbers_from_the_start_and_live_inside_the_block(tmp_path):
    fresh = DebugInfo(datetime.now().astimezone(), sonde.DebugMode.FULL_DEBUG, sonde.DebugLevel.BASIC, "step")
    numbers = (fresh.execution_time, fresh.memory_usage, fresh.gpu_memory, fresh.gradient_norm, fresh.loss, fresh.param_norm)
    assert numbers == (0.0,) * 6
    before = datetime.now().astimezone()
    with debugger(tmp_path).debug_context("block") as info:
        first = info.execution_time
        sum(range(20_000))
        second = info.execution_time
        assert info.memory_usage > 0
        assert info.gradient_norm == 0.0
    assert 0.0 <= first < second <= info.execution_time
    assert info.execution_time == info.execution_time  # constant after the end
    assert before <= info.timestamp <= datetime.now().astimezone()


def test_in_mode_none_the_step_runs_and_nothing_is_recorded(tmp_path):
    tool, model = debugger(tmp_path, mode="none"), model_examples.mlp()
    x, y = batch()
    loss = F.mse_loss(model(x), y).item()
    found = tool.debug_training_step(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, x, y)
    assert found == {"loss": loss, "gradient_norm": 0.0, "param_norm": 0.0, "cpu_memory": 0.0, "gpu_memory": 0.0, "execution_time": 0.0}
    assert tool.debug_history == []


def test_nothing_is_written_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tool, model = PyTorchDebugManager(), model_examples.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        tool.debug_training_step(model, optimizer, F.mse_loss, *batch())
    x, y = batch()
    tool.debug_training_step(model, optimizer, F.mse_loss, x * math.nan, y)
    assert tool.create_debug_report()["summary"]["anomalies_detected"] > 0
    tool.close()
    assert list(tmp_path.rglob("*")) == []


# ---- anomalies


class Constant(nn.Module):
    """Its output does not depend on its parameter: the gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight * 0)


@pytest.mark.parametrize("place", ["input", "output"])
def test_a_nan_in_input_or_output_of_a_forward_is_an_anomaly_with_its_cause(place, tmp_path, caplog):
    tool = debugger(tmp_path)
    x, _ = batch()
    model = Logarithm() if place == "output" else nn.Linear(6, 1)
    if place == "input":
        x[0, 0] = math.nan
    tool.debug_forward_pass(model, x)
    assert tool.debug_history[-1].anomaly_detected
    assert f"the {place} is not finite" in tool.debug_history[-1].notes
    assert "cause: " in caplog.text
    assert any("cause: " in note for note in tool.create_debug_report()["details"]["notes"])


def test_a_nan_gradient_of_a_finite_loss_is_an_anomaly_and_the_report_says_where_its_cause_is_searched(tmp_path, caplog):
    tool, model = debugger(tmp_path), nn.Linear(6, 1)
    for _ in range(2):
        output = tool.debug_forward_pass(model, batch()[0])
        loss = torch.sqrt((output - output.detach()) ** 2).mean()  # 0, and the derivative of the root is infinite there
        assert math.isnan(tool.debug_backward_pass(loss, model))
    first, second = (info for info in tool.debug_history if info.operation == "backward_pass")
    assert first.anomaly_detected
    assert first.notes[0] == "the gradient of weight is not finite"
    assert "sonde.find_origin(model)" in first.notes[1]
    assert "sonde.find_origin(model)" in caplog.text
    assert second.notes == ["the gradient of weight is not finite"]


def test_the_report_says_which_gradients_are_not_finite_and_does_not_call_them_exploding(tmp_path):
    tool, model = debugger(tmp_path), nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for factor in (1.0, 1.0, math.nan):
        tool.debug_training_step(model, optimizer, lambda output, y, factor=factor: F.mse_loss(output, y) * factor, *batch())
    report = tool.create_debug_report()
    assert (report["details"]["gradients"]["nonfinite_layers"], report["details"]["gradients"]["exploding_layers"]) == (["0", "1"], [])
    assert "1 of 3 not finite, in 0, 1" in str(report)
    assert "exploding" not in str(report)


def test_a_gradient_norm_of_zero_is_an_anomaly(tmp_path):
    tool, model = debugger(tmp_path), Constant()
    x, y = batch()
    assert tool.debug_backward_pass(F.mse_loss(model(x), y), model) == 0.0
    assert tool.debug_history[-1].anomaly_detected
    assert tool.create_debug_report()["gradient_analysis"]["gradient_anomalies"] == 1


@pytest.mark.parametrize("step_of_spike", [0, 1, 3, 40])
def test_an_exploding_gradient_norm_is_an_anomaly_from_the_first_step_on(step_of_spike, tmp_path):
    tool, model = debugger(tmp_path), model_examples.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(step_of_spike + 1):
        optimizer.zero_grad()
        x, y = batch()
        tool.debug_backward_pass(F.mse_loss(model(x), y) * (1e6 if step == step_of_spike else 1), model)
    assert [info.number for info in tool.debug_history if any("explodes" in note for note in info.notes)] == [step_of_spike]


def test_gradient_norms_of_healthy_batches_do_not_explode():
    norms = GradientNorms()
    factors = (1.0, 8.0, 0.3, 5.0, 2.0, 0.5, 9.0, 1.5)
    assert not any(norms.update(factors[i % 8], lambda: 10.0) for i in range(100))


def test_the_first_note_of_the_report_is_the_first_anomaly(tmp_path):
    tool = debugger(tmp_path)
    for number in range(60):
        with tool.debug_context("step") as info:
            info.loss = math.inf if number % 2 else 1.0
    notes = tool.create_debug_report()["details"]["notes"]
    assert notes[0] == "step 1: the loss is Infinity"
    assert tool.create_debug_report()["summary"]["anomalies_detected"] == 30


def test_a_gradient_norm_that_the_block_sets_is_checked_and_recorded(tmp_path):
    tool = debugger(tmp_path)
    with tool.debug_context("mine") as info:
        info.gradient_norm = math.nan
    assert info.anomaly_detected
    assert len(tool.gradient_history) == 1


def test_numbers_that_a_block_sets_may_be_tensors_of_one_number_and_nothing_else(tmp_path):
    tool = debugger(tmp_path)
    with tool.debug_context("mine") as info:
        info.loss = torch.tensor(0.5, requires_grad=True)
    assert type(info.loss) is float
    with pytest.raises(SondeError, match="one number, not a list"), tool.debug_context("mine") as info:
        info.loss = [1.0]
    with pytest.raises(KeyError, match="user"), tool.debug_context("mine") as info:
        {}[setattr(info, "loss", [1.0]) or "user"]
    with tool.debug_context("next") as info:
        pass
    assert info.inside == ""  # the failed block has ended


def test_a_module_without_gradients_is_an_anomaly_and_lazy_parameters_are_passed_over(tmp_path):
    tool, model = debugger(tmp_path), nn.ModuleDict({"used": nn.Linear(6, 1), "lazy": nn.LazyLinear(3)})
    x, y = batch()
    optimizer = torch.optim.SGD(model["used"].parameters(), lr=0.1)
    assert tool.debug_backward_pass(F.mse_loss(model["used"](x), y), model) > 0
    assert math.isfinite(tool.debug_optimization_step(optimizer, model))
    assert not any(info.anomaly_detected for info in tool.debug_history)
    other = nn.Linear(6, 1)
    assert tool.debug_backward_pass(F.mse_loss(model["used"](x), y), other) == 0.0
    assert "the gradient norm is 0: no parameter has a gradient" in tool.debug_history[-1].notes


# ---- files


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_save_debug_info_writes_a_line_per_operation(tmp_path):
    tool, model = debugger(tmp_path, save_debug_info=True), model_examples.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        tool.debug_training_step(model, optimizer, F.mse_loss, *batch(), 1, step)
    tool.close()
    lines = lines_of(tmp_path / "debug_info.jsonl")
    infos = tool.debug_history
    assert [(line["operation"], line["batch"]) for line in lines] == [(info.operation, info.batch) for info in infos]
    assert [line["execution_time"] for line in lines] == [info.execution_time for info in infos]
    forward, update = lines[0], lines[3]
    assert forward["statistics"]["output.0"]["num"] == 16
    assert set(update["statistics"]) == {name for name, _ in model.named_parameters()}
    assert datetime.fromisoformat(forward["timestamp"]) == infos[0].timestamp


def test_saved_lines_and_the_training_log_are_rotated_by_size(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(batch_log_file.RotatingFile.__init__, "__kwdefaults__", {"max_bytes": 2000})
    tool, model = debugger(tmp_path, save_debug_info=True), model_examples.mlp()
    tool.setup_training_logging("run")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        tool.debug_training_step(model, optimizer, F.mse_loss, *batch(), 1, step)
    tool.close()
    for name in ("debug_info.jsonl", "run.log"):
        files = sorted(tmp_path.glob(f"{name}*"))
        assert len(files) == 1 + batch_log_file.NUM_OLD
        assert max(path.stat().st_size for path in files) <= 8000  # one line may be longer than the limit


@pytest.mark.parametrize("setting", ["log_activations", "log_weights", "log_memory", "log_performance"])
def test_each_log_setting_acts_on_lines_histories_and_report(setting, tmp_path, capsys):
    results = {}
    for value in (True, False):
        folder = tmp_path / str(value)
        tool, model = debugger(folder, save_debug_info=True, **{setting: value}), model_examples.mlp()
        tool.setup_training_logging("run")
        tool.debug_training_step(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, *batch())
        report = tool.create_debug_report()
        tool.close()
        lines = lines_of(folder / "debug_info.jsonl")
        log = (folder / "run.log").read_text(encoding="utf-8")
        results[value] = {
            "log_activations": ("outputs" in report["details"]["statistics"], "statistics" in lines[0], "outputs  " in str(report)),
            "log_weights": ("weights" in report["details"]["statistics"], "statistics" in lines[3], "weights  " in str(report)),
            "log_memory": (
                bool(tool.memory_history), report["memory_analysis"]["max_memory_usage"] is not None, "memory_usage" in lines[0],
                "cpu_memory=" in log,
            ),
            "log_performance": (
                bool(tool.performance_history), report["performance_analysis"]["max_execution_time"] is not None,
                "execution_time" in lines[0], "execution_time=" in log, "p50 ms" in str(report), " s in total" in str(report),
            ),
        }  # fmt: skip
    assert all(results[True][setting])
    assert not any(results[False][setting])


def test_the_training_log_has_a_line_per_batch_unless_asked_otherwise(tmp_path, capsys):
    for name, options, num in (("each", {}, 30), ("rare", {"interval_s": 3600.0}, 1)):
        tool, model = debugger(tmp_path), model_examples.mlp()
        tool.setup_training_logging(name, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(30):
            tool.debug_training_step(model, optimizer, F.mse_loss, *batch(), 0, step)
        tool.close()
        text = (tmp_path / f"{name}.log").read_text(encoding="utf-8")
        assert text.count(" loss=") == num


def test_metrics_can_be_logged_by_hand(tmp_path, capsys):
    manager = debugger(tmp_path)
    manager.setup_training_logging("hand")
    manager.training_logger.log_batch_metrics({"loss": torch.tensor(0.5), "accuracy": 0.25, "phase": "warm-up\x1b"})
    with pytest.raises(SondeError, match="values by name"):
        manager.training_logger.log_batch_metrics(3)
    manager.close()
    assert "loss=0.5 accuracy=0.25 phase=warm-up\\x1b" in (tmp_path / "hand.log").read_text(encoding="utf-8")


def test_a_log_is_written_once_however_often_it_is_set_up(tmp_path, capsys):
    root = list(logging.getLogger().handlers)
    tool, model = debugger(tmp_path), model_examples.mlp()
    tool.setup_training_logging("first")
    with pytest.raises(SondeError):
        tool.setup_training_logging("")
    assert tool.training_logger is not None  # the first log is still open
    logger = tool.setup_training_logging("../first/\x1b[31m")
    tool.debug_training_step(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, *batch())
    tool.close()
    files = sorted(tmp_path.glob("*.log"))
    assert len(files) == 1
    assert files[0].read_text(encoding="utf-8").count("gradient_norm=") == 1
    assert capsys.readouterr().out.count("loss=") == 1
    assert logger.handlers == []
    assert logging.getLogger().handlers == root


def test_debugger_and_session_measure_the_same_numbers(tmp_path):
    model = model_examples.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        tool = PyTorchDebugManager(session=session)
        for _ in range(10):
            tool.debug_training_step(model, optimizer, F.mse_loss, *batch())
    run = sonde.Run(tmp_path / "run")
    losses, norms = run.scalar("loss")[1], run.scalar("grad_norm")[1]
    mine = [info for info in tool.debug_history if info.operation == "training_step"]
    assert losses == pytest.approx([info.loss for info in mine], rel=1e-6)
    assert norms == pytest.approx([info.gradient_norm for info in mine], rel=1e-5)
    assert tool.create_debug_report()["details"]["verdict"] in ("healthy", "unknown")


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda tool: tool.debug_forward_pass("net", 1), "nn.Module"),
        (lambda tool: tool.debug_backward_pass(torch.zeros(3), model_examples.mlp()), r"loss\.mean"),
        (lambda tool: tool.debug_context("").__enter__(), "needs a name"),
        (lambda tool: tool.debug_performance(3), "int"),
        (lambda tool: tool.setup_training_logging(" "), "needs a name"),
        (lambda tool: tool.setup_training_logging("run", interval_s=-1), "seconds"),
        (lambda tool: PyTorchDebugger("full"), "DebugConfig"),
        (lambda tool: PyTorchDebugger({"mode": 1}), "mode is one of none, anomaly_detection"),
        (
            lambda tool: tool.debug_optimization_step(None, model_examples.mlp()),
            r"optimizer must be a torch\.optim\.Optimizer, not a NoneType",
        ),
        (lambda tool: tool.debug_optimization_step(model_examples.mlp(), model_examples.mlp()), "optimizer must be"),
        (lambda tool: tool.debug_training_step(model_examples.mlp(), None, F.mse_loss, *batch()), "optimizer must be"),
        (lambda tool: tool.debug_training_step(model_examples.mlp(), sgd(), None, *batch()), "loss_fn must be a function"),
        (lambda tool: tool.debug_training_step(model_examples.mlp(), sgd(), lambda output, y: 1.0, *batch()), "loss must be a tensor"),
        (lambda tool: tool.debug_backward_pass(None, model_examples.mlp()), "not a NoneType"),
        (lambda tool: tool.debug_model_inference(None, 1), "nn.Module"),
    ],
)
def test_a_wrong_argument_is_refused_with_a_sentence(wrong, message, tmp_path):
    with pytest.raises(SondeError, match=message):
        wrong(debugger(tmp_path))
