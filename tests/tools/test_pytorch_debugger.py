"""PyTorchDebugger: its numbers against torch's own, the training bit by bit as without it, and none of the textbook's mistakes."""

from __future__ import annotations

import copy
import json
import logging
import math
from time import perf_counter

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import sonde  # noqa: E402
import zoo  # noqa: E402
from sonde import DebugConfig, DebugInfo, NonFiniteError, PyTorchDebugger, PyTorchDebugManager, SondeError  # noqa: E402
from sonde.tools.loop_debugger.loop_report import NOTHING, SECTIONS  # noqa: E402
from sonde.tools.loop_debugger.measurements import anomaly_mode  # noqa: E402
from sonde.tools.loop_debugger.operation_history import Book  # noqa: E402

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


def trained(tmp_path, steps: int = 20) -> PyTorchDebugger:
    tool, model = debugger(tmp_path), zoo.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        tool.debug_training_step(model, optimizer, F.mse_loss, *batch(), 0, step)
    return tool


# ---- numbers


def test_a_step_gives_the_six_numbers_and_each_agrees_with_torch(tmp_path):
    tool, model = debugger(tmp_path), zoo.mlp()
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
    program = zoo.BY_NAME[name]
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
        model, tool = zoo.conv(), debugger(tmp_path)
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
    found = debugger(tmp_path).debug_backward_pass(model(torch.tensor([[1, 2], [2, 2]])).sum(), model)
    whole = math.sqrt(sum(float(p.grad.to_dense().square().sum()) for p in model.parameters()))
    assert found["gradient_norm"] == pytest.approx(whole, rel=1e-6)


def test_the_time_of_a_block_is_its_own_time(tmp_path):
    tool = debugger(tmp_path)
    before = perf_counter()
    with tool.debug_context("block", "net", epoch=2, batch=7) as info:
        began = perf_counter()
        assert info.execution_time is None  # it does not exist yet
        sum(range(20_000))
        inside = perf_counter() - began
    around = perf_counter() - before
    assert inside <= info.execution_time <= around
    assert (info.operation, info.model_name, info.epoch, info.batch) == ("block", "net", 2, 7)


def test_what_is_inside_takes_no_longer_than_the_whole(tmp_path):
    infos = trained(tmp_path, 5).debug_info
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
        kept = np.ones(80 * 2**20, np.uint8)
    assert 70 <= after.memory_usage - before.memory_usage <= 100
    del kept


def test_memory_usage_tells_whose_tensors_it_is(tmp_path):
    tool, model = debugger(tmp_path), nn.Linear(512, 512)
    optimizer = torch.optim.Adam(model.parameters())
    tool.debug_training_step(model, optimizer, F.mse_loss, torch.randn(4, 512), torch.randn(4, 512))
    found = tool.debug_memory_usage()
    size = sum(p.nbytes for p in model.parameters()) / 2**20
    # Everything that is alive counts, also what other tests have left.
    assert found["tensors"]["parameters"] == pytest.approx(size, rel=0.1)
    assert found["tensors"]["gradients"] == pytest.approx(size, rel=0.1)
    assert found["tensors"]["optimizer state"] == pytest.approx(2 * size, rel=0.1)
    assert 0 < found["cpu_memory"] <= found["cpu_peak"]


def test_forward_gives_what_the_model_gives(tmp_path):
    model, (x, _) = zoo.mlp(), batch()
    assert torch.equal(debugger(tmp_path).debug_forward_pass(model, x), model(x))
    assert torch.equal(debugger(tmp_path).debug_forward_pass(model, (x,)), model(x))
    assert torch.equal(debugger(tmp_path).debug_forward_pass(model, {"input": x}), model(x))


def test_inference_is_in_eval_mode_and_leaves_the_mode_and_the_random_state(tmp_path):
    model = zoo.conv()
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


def test_performance_of_a_call_and_of_an_operation_by_name(tmp_path):
    tool = debugger(tmp_path)
    found = tool.debug_performance(sorted, [3, 1, 2])
    assert found["result"] == [1, 2, 3]
    assert tool.debug_performance("sorted")["calls"] == 1
    with pytest.raises(SondeError, match="sorted"):
        tool.debug_performance("sortet")


# ---- the mistakes that must not return


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


def test_in_the_mode_for_anomalies_torch_looks_too_and_stops_looking_afterwards(tmp_path):
    tool = debugger(tmp_path, mode="anomaly_detection")
    seen = []

    def work():
        seen.append(torch.is_anomaly_enabled())
        raise KeyError

    with pytest.raises(KeyError), tool.debug_context("outer"):
        tool.debug_performance(work)
    assert seen == [True]
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
def test_a_bad_gradient_that_torch_finds_stops_the_step_in_the_same_way(tmp_path):
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
        tool, model = debugger(tmp_path, **settings), zoo.mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = batch()
        tool.debug_backward_pass(F.mse_loss(tool.debug_forward_pass(model, x), y), model)
        update = tool.debug_optimization_step(optimizer, model)
        report = tool.create_debug_report()
        layers = "layer_norms" in report["gradient_analysis"]
        return len(tool.debug_info), layers, bool(report["memory_analysis"].get("tensors")), update["update_norm"] is not None

    assert found(mode="none") == (0, False, False, False)
    assert found(mode="anomaly_detection") == (3, False, False, False)
    assert found(mode="gradient_checking") == (3, True, False, False)
    assert found(mode="gradient_checking", level="basic") == (3, False, False, False)
    assert found(mode="gradient_checking", level="advanced") == (3, True, False, True)
    assert found(mode="memory_profiling") == (3, False, True, False)
    assert found(mode="full_debug", level="advanced") == (3, True, True, True)


def test_the_update_is_what_the_parameters_moved(tmp_path):
    tool, model = debugger(tmp_path, level="advanced"), zoo.mlp()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch()
    tool.debug_backward_pass(F.mse_loss(model(x), y), model)
    found = tool.debug_optimization_step(optimizer, model)
    moved = torch.nn.utils.get_total_norm([p.detach() - old for p, old in zip(model.parameters(), before)]).item()
    assert found["update_norm"] == pytest.approx(moved, rel=1e-5)
    assert found["update_ratio"] == pytest.approx(moved / found["param_norm"], rel=1e-5)


def test_a_debugged_step_leaves_the_anomaly_mode_on(tmp_path):
    with torch.autograd.set_detect_anomaly(True):
        trained(tmp_path, 1)
        assert torch.is_anomaly_enabled()


def test_nothing_recorded_is_said_in_every_section(tmp_path):
    report = debugger(tmp_path).create_debug_report()
    assert set(report) == set(SECTIONS)
    assert all(section["status"] == NOTHING for section in report.values())
    assert report.is_empty
    assert "nothing recorded" in str(report)
    assert debugger(tmp_path).create_debug_plots().stat().st_size > 1000


@pytest.mark.timing  # memory of the whole process: nothing else may be in it
def test_memory_that_grows_is_a_leak_and_memory_that_is_given_back_is_none(tmp_path):
    for leaks in (False, True):
        tool, kept = debugger(tmp_path), []
        for _ in range(64):
            with tool.debug_context("step") as info:
                block = np.ones(2**20, np.uint8)
                if leaks:
                    kept.append(block)
        assert info.memory_leak_detected is leaks, info.notes
        assert tool.create_debug_report()["memory_analysis"]["leak_detected"] is leaks


def book_of(times_ms: list[float], worked_ms: float | None = None) -> list[DebugInfo]:
    book = Book(lambda kind, sentence: None)
    for number, ms in enumerate(times_ms):
        info = DebugInfo(0.0, sonde.DebugMode.FULL_DEBUG, sonde.DebugLevel.BASIC, "step", execution_time=ms / 1e3, number=number)
        book.add(info, worked_s=None if worked_ms is None or number != len(times_ms) - 1 else worked_ms / 1e3)
    return list(book.infos)


@pytest.mark.parametrize("usual_ms", [0.01, 1.0, 3000.0])
def test_slow_is_what_is_slow_beside_the_same_operation_whatever_its_scale(usual_ms):
    times = [usual_ms * (1 + 0.1 * (i % 5)) for i in range(60)]
    assert not any(info.performance_issue_detected for info in book_of([*times, 1.8 * usual_ms]))
    assert book_of([*times, 10 * usual_ms])[-1].performance_issue_detected
    assert not book_of([*times, 10 * usual_ms], worked_ms=usual_ms)[-1].performance_issue_detected  # another program had the processor


def test_warn_goes_on_and_raise_stops_before_the_update(tmp_path, caplog):
    x, y = batch()
    x[3, 2] = math.nan
    for mode in ("warn", "raise"):
        model = zoo.mlp()
        before = copy.deepcopy(model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tool = debugger(tmp_path, anomaly_detection_mode=mode)
        if mode == "warn":
            found = tool.debug_training_step(model, optimizer, F.mse_loss, x, y)
            assert math.isnan(found["loss"])
            assert math.isnan(found["param_norm"])
            assert "the loss is NaN" in caplog.text
        else:
            with pytest.raises(NonFiniteError, match="before the update") as caught:
                tool.debug_training_step(model, optimizer, F.mse_loss, x, y)
            assert caught.value.origin.phase == "input"
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert tool.debug_info[-1].anomaly_detected


class Logarithm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(torch.relu(self.fc(x)))


def test_a_bad_step_is_traced_to_the_operation_that_made_it(tmp_path):
    tool, model = debugger(tmp_path), Logarithm()
    tool.debug_training_step(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, *batch())
    assert any(note.startswith("log") and "zero" in note for note in tool.debug_info[-1].notes), tool.debug_info[-1].notes


def test_an_exception_of_the_user_passes_through_and_is_counted(tmp_path):
    tool, error = debugger(tmp_path), KeyError("mine")
    with pytest.raises(KeyError) as caught, tool.debug_context("load"):
        raise error
    assert caught.value is error
    assert tool.debug_info[-1].error == "KeyError: 'mine'"
    assert tool.create_debug_report()["summary"]["num_errors"] == 1


# ---- report, picture, log, session


def test_the_report_agrees_with_what_was_recorded(tmp_path):
    tool = trained(tmp_path)
    report, infos = tool.create_comprehensive_report(), tool.debug_info
    steps = [info for info in infos if info.operation == "training_step"]
    norms = [info.gradient_norm for info in infos if info.operation == "backward_pass"]
    assert report["summary"]["num_training_steps"] == 20
    assert report["summary"]["last_loss"] == steps[-1].loss
    assert report["performance_analysis"]["average_time"] == pytest.approx(sum(info.execution_time for info in steps) / 20)
    assert report["gradient_analysis"]["average_norm"] == pytest.approx(sum(norms) / 20)
    assert report["gradient_analysis"]["max_norm"] == max(norms)
    assert set(report["gradient_analysis"]["layer_norms"]) == {"0", "2", "4"}
    assert report["memory_analysis"]["cpu"]["peak"] == max(info.memory_usage for info in steps)
    whole = report["operation_breakdown"]["operations"]["training_step"]
    assert (whole["calls"], whole["share"]) == (20, 1.0)
    assert max(map(len, str(report).splitlines())) <= 80
    assert "optimization_step" in report._repr_html_()


def test_the_report_of_a_bad_run_is_strict_json(tmp_path):
    tool, model = debugger(tmp_path), zoo.mlp()
    x, y = batch()
    tool.debug_training_step(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, x * math.inf, y)
    document = json.loads(tool.create_debug_report().to_json(), parse_constant=lambda name: pytest.fail(name))
    assert document["summary"]["last_loss"] == "NaN"
    assert document["gradient_analysis"]["average_norm"] is None


def test_the_picture_has_four_panels_with_every_number_in_it(tmp_path):
    tool = trained(tmp_path, 6)
    path = tool.create_debug_plots(tmp_path / "loop.json")
    panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
    assert list(panels) == ["loss", "gradient norm", "time", "memory"]
    assert panels["loss"]["series"]["loss"]["values"] == [info.loss for info in tool.debug_info if info.operation == "training_step"]
    assert tool.create_debug_plots() == tmp_path / "debug_plots.png"


def test_a_log_is_written_once_however_often_it_is_set_up(tmp_path, capsys):
    root = list(logging.getLogger().handlers)
    tool, model = debugger(tmp_path), zoo.mlp()
    tool.setup_training_logging("first")
    logger = tool.setup_training_logging("../first/\x1b[31m")
    tool.debug_training_step(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, *batch())
    tool.close()
    files = sorted(tmp_path.glob("*.log"))
    assert len(files) == 1
    assert files[0].read_text(encoding="utf-8").count("gradient_norm=") == 1
    assert capsys.readouterr().out.count("loss=") == 1
    assert logger.handlers == []
    assert logging.getLogger().handlers == root


def test_beside_a_session_both_see_the_same_numbers(tmp_path):
    model = zoo.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        tool = PyTorchDebugManager(session=session)
        for _ in range(10):
            tool.debug_training_step(model, optimizer, F.mse_loss, *batch())
    run = sonde.Run(tmp_path / "run")
    losses, norms = run.scalar("loss")[1], run.scalar("grad_norm")[1]
    mine = [info for info in tool.debug_info if info.operation == "training_step"]
    assert losses == pytest.approx([info.loss for info in mine], rel=1e-6)
    assert norms == pytest.approx([info.gradient_norm for info in mine], rel=1e-5)
    assert tool.create_debug_report()["summary"]["verdict"] in ("healthy", "unknown")


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda tool: tool.debug_forward_pass("net", 1), "nn.Module"),
        (lambda tool: tool.debug_backward_pass(torch.zeros(3), zoo.mlp()), r"loss\.mean"),
        (lambda tool: tool.debug_context("").__enter__(), "needs a name"),
        (lambda tool: tool.debug_performance(3), "int"),
        (lambda tool: tool.setup_training_logging(" "), "needs a name"),
        (lambda tool: PyTorchDebugger({"mode": 1}), "DebugConfig"),
    ],
    ids=["model", "loss", "operation", "call", "log", "config"],
)
def test_wrong_things_are_refused_with_a_letter(wrong, said, tmp_path):
    with pytest.raises(SondeError, match=said):
        wrong(debugger(tmp_path))
