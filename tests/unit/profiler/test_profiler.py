"""Profiler: sections, layers of a model, and a model that is restored bit by bit."""

from __future__ import annotations

import copy
import random
import re
import sys
import threading
from pathlib import Path
from time import thread_time_ns
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import sonde  # noqa: E402
from sonde import Profiler, SondeError  # noqa: E402
from sonde.profiler import ProfileReport  # noqa: E402
from sonde.profiler.profile_model import profile_model  # noqa: E402
from sonde.profiler.run_and_time_steps import StepRecordings  # noqa: E402

pytestmark = pytest.mark.torch
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from workloads import WORKLOADS, Workload  # noqa: E402


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(16, 4))


# ---- layers and the step


def by_cpu_time(workload: Workload, repeats: int) -> tuple[ProfileReport, StepRecordings]:
    """Measured with the CPU clock of the thread, so that other programs on this machine matter less."""
    model, criterion, inputs, targets = workload.make()
    part = 1 if workload.name == "mlp" else 4  # of the batch: large ones take long
    inputs, targets = (each[: len(each) // part] for each in (inputs, targets))
    return profile_model(
        model, (inputs,), {}, loss=lambda output: criterion(output.flatten(0, -2), targets),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), warmup=1, repeats=repeats, backward=True, read=thread_time_ns,
    )  # fmt: skip


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_layers_and_the_named_remainder_add_up_to_the_step(workload: Workload) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        report, recordings = by_cpu_time(workload, 25 if workload.name == "mlp" else 3)
    finally:
        torch.set_num_threads(before)
    for step, times in zip(recordings.timed, recordings.timed_ms):
        own = sum(cost.forward_self + cost.backward_self for cost in step.layers.values()) + step.loss_backward + step.engine
        assert own / 1e6 + times["optimizer"] + times["other"] == pytest.approx(times["step"], rel=0.02)
    # Other load may differ between bare and timed steps: benchmarks/profiler.py measures how close they are.
    assert report.accounted_ms == pytest.approx(report.step.median_ms, rel=0.2)


@pytest.fixture(scope="module")
def profiled() -> ProfileReport:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 1))
    return Profiler().profile(model, torch.randn(64, 256), loss=lambda y: y.square().mean(), warmup=1, repeats=5)


def test_a_report_has_layers_in_their_order_with_times_forward_and_backward(profiled: ProfileReport) -> None:
    assert [(layer.path, layer.kind, layer.depth) for layer in profiled.layers] == [
        ("", "Sequential", 0), ("0", "Linear", 1), ("1", "Tanh", 1), ("2", "Linear", 1), ("3", "Linear", 1),
    ]  # fmt: skip
    assert all(layer.forward.num == layer.backward.num >= 5 for layer in profiled.layers)
    whole, big, tiny = profiled.layer(""), profiled.layer("2"), profiled.layer("3")
    assert whole.total_ms > big.total_ms > tiny.total_ms > 0
    assert whole.self_ms < 0.5 * whole.total_ms


def test_a_report_has_phases_batch_memory_and_environment(profiled: ProfileReport) -> None:
    assert set(profiled.phases) == {"forward", "backward", "other"}
    assert (profiled.num_samples, profiled.num_tokens, profiled.batch) == (64, None, "float32 [64, 256]")
    assert profiled.samples_per_s > 0
    assert profiled.tokens_per_s is None
    assert 0 < profiled.mfu < 2
    assert profiled.utilisation["num_cores"] >= 1
    assert profiled.layer("2").parameter_bytes == (512 * 512 + 512) * 4
    assert profiled.layer("1").memory_self_bytes == 64 * 512 * 4
    assert profiled.environment["dtype"] == "float32"
    assert profiled.own_cost > 0
    assert not any("loss" in note for note in profiled.notes)


def test_tokens_are_counted_if_inputs_are_integers_in_two_dimensions() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    assert Profiler().profile(model, torch.randint(10, (3, 5)), warmup=0, repeats=1).num_tokens == 15


def test_spans_of_one_kind_are_nested_or_disjoint(profiled: ProfileReport) -> None:
    assert {span.kind for span in profiled.spans} == {"forward", "backward", "phase"}
    for key in {(span.step, span.kind) for span in profiled.spans}:
        ends: list[float] = []
        for span in sorted((s for s in profiled.spans if (s.step, s.kind) == key), key=lambda s: (s.start_ms, -s.duration_ms)):
            while ends and ends[-1] <= span.start_ms + 1e-9:
                ends.pop()
            assert not ends or span.start_ms + span.duration_ms <= ends[-1] + 1e-6
            ends.append(span.start_ms + span.duration_ms)


def test_inference_is_timed_without_gradients() -> None:
    report = Profiler().profile(small().eval(), torch.randn(4, 8), backward=False, warmup=0, repeats=2)
    assert set(report.phases) == {"forward", "other"}
    assert not report.layer("").backward.is_known
    assert report.notes[0] == "only the forward was timed, without gradients"


def test_a_model_without_anything_to_train_has_no_backward() -> None:
    report = Profiler().profile(small().requires_grad_(False), torch.randn(4, 8), warmup=0, repeats=1)
    assert "there is no backward to time" in report.notes[0]


def test_the_loss_of_the_models_output_is_used_if_it_has_one() -> None:
    class Output:
        def __init__(self, loss: Any) -> None:
            self.loss = loss

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def forward(self, x: Any) -> Output:
            return Output(self.layer(x).mean())

    report = Profiler().profile(Model(), torch.randn(4, 8), warmup=0, repeats=1)
    assert not any("no loss was given" in note for note in report.notes)
    assert report.layer("layer").backward.median_ms > 0


# ---- nothing is changed


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    tensors = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    tensors += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    tensors += [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    return [*tensors, torch.get_rng_state()]


def test_model_optimizer_and_random_state_are_as_before() -> None:
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x = torch.randn(6, 8, requires_grad=True)
    model(x).sum().backward()
    optimizer.step()
    before = copy.deepcopy(everything(model, optimizer))
    grads, x_grad = [p.grad for p in model.parameters()], x.grad
    x_copy = x_grad.clone()
    generators = random.getstate(), np.random.get_state()[1].tolist()
    graph = model(x)  # a graph that lives on: its backward must still be possible
    torch.set_rng_state(before[-1])
    before = copy.deepcopy(everything(model, optimizer))
    Profiler().profile(model, x, loss=lambda y: y.square().mean(), optimizer=optimizer, warmup=1, repeats=2)
    after = everything(model, optimizer)
    assert len(after) == len(before)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(after, before))
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads))
    assert x.grad is x_grad
    assert torch.equal(x_grad, x_copy)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == generators
    graph.sum().backward()
    assert all("forward" not in module.__dict__ and not module._forward_hooks for module in model.modules())


def test_training_continues_as_if_it_had_not_been_profiled() -> None:
    def train(profile: bool) -> list[Any]:
        torch.manual_seed(1)
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(6):
            if profile and step == 3:
                Profiler().profile(model, torch.ones(5, 8), optimizer=optimizer, warmup=1, repeats=1)
            optimizer.zero_grad()
            model(torch.randn(6, 8)).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False)))


def test_a_model_that_raises_is_unchanged_and_the_message_has_its_error() -> None:
    model = small()
    with pytest.raises(SondeError, match=r"could not be run with these inputs: RuntimeError: mat1 and mat2"):
        Profiler().profile(model, torch.randn(4, 9))
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_session_does_not_record_the_profiled_steps(tmp_path: Path) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()

    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True) as session:
        step()
        report = session.profiler.profile(model, torch.randn(6, 8), optimizer=optimizer, warmup=1, repeats=2)
        step()
    assert report.layer("4").forward.num >= 2
    assert session.profiler.report().layers == report.layers
    assert len(list(sonde.Run(tmp_path / "run").steps())) == 2


# ---- sections and recorded layers


def test_sections_may_be_nested() -> None:
    profiler = Profiler()
    with profiler.section("epoch"):
        for _ in range(3):
            with profiler.section("load"):
                pass
    found = {section.name: section for section in profiler.report().sections}
    assert (found["load"].calls, found["load"].parent, found["epoch"].parent) == (3, "epoch", "")
    assert found["epoch"].total_ms >= found["load"].total_ms >= 0
    assert [span.name for span in profiler.report().spans] == ["epoch", "load", "load", "load"]


def test_a_section_ends_after_an_exception() -> None:
    profiler = Profiler()
    with pytest.raises(ValueError, match="mine"), profiler.section("a"):
        raise ValueError("mine")
    assert profiler.report().sections[0].calls == 1


def test_a_timer_returns_seconds() -> None:
    profiler = Profiler()
    profiler.start_timer("a")
    seconds = profiler.end_timer("a")
    assert seconds == pytest.approx(profiler.report().sections[0].total_ms / 1e3)


def test_timers_of_one_name_run_in_several_threads() -> None:
    profiler = Profiler()
    together = threading.Barrier(2)

    def work() -> None:
        with profiler.section("work"):
            together.wait(30)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert profiler.report().sections[0].calls == 2
    assert {span.thread for span in profiler.report().spans} == {0, 1}


def test_misuse_of_timers_raises_an_error_with_instructions() -> None:
    profiler = Profiler()
    with pytest.raises(SondeError, match="nothing was measured yet"):
        profiler.report()
    with pytest.raises(SondeError, match="'load' was not started"):
        profiler.stop("load")
    profiler.start("load")
    with pytest.raises(SondeError, match=r"the timer load still runs\.\nCall stop\('load'\) before report"):
        profiler.report()
    with pytest.raises(SondeError, match="'load' is running already"):
        profiler.start("load")
    with pytest.raises(SondeError, match="Running in this thread: load"):
        profiler.stop("lod")
    with pytest.raises(SondeError, match="needs a name"):
        profiler.start("")


def test_a_report_of_timers_has_their_shares_and_says_how_to_get_layers() -> None:
    profiler = Profiler()
    with profiler.section("train"):
        model = small()
        with profiler.section("forward"):
            model(torch.ones(4, 8))
    profiler.start("save")
    text = profiler.report().summary(width=100)
    assert re.search(r"^train +1 +\S+ +100 % ", text, re.MULTILINE)
    assert "profiler.profile(model, inputs)" in text
    assert "still running and not in this report: save" in text
    profiler.profile(small(), torch.ones(4, 8), warmup=1, repeats=1)
    assert "profiler.profile(model, inputs)" not in profiler.report().summary(width=100)


def test_sections_layers_and_the_step_have_latency_percentiles() -> None:
    profiler = Profiler()
    for _ in range(20):
        with profiler.section("load"):
            pass
    for milliseconds in range(1, 101):
        profiler.record_layer_execution("kernel", "Custom", milliseconds / 1e3)
    profiler.profile(small(), torch.ones(4, 8), warmup=1, repeats=3)
    report = profiler.report()
    kernel = report.layer("kernel").latency
    assert (kernel.p50_ms, kernel.p95_ms, kernel.p99_ms) == pytest.approx((50.5, 95.05, 99.01))
    for spread in (report.step, report.layer("0").latency, report.sections[0].spread):
        assert 0 < spread.fastest_ms <= spread.p50_ms <= spread.p95_ms <= spread.p99_ms
    layer = report.layer("0")
    assert layer.latency.fastest_ms >= (layer.forward.fastest_ms + layer.backward.fastest_ms) * (1 - 1e-9)  # sums are rounded
    text = report.summary()
    assert re.search(r"^latency +p50 ms +p95 ms +p99 ms +of$", text, re.MULTILINE)
    assert re.search(r"^kernel +50\.5 +95\.0 +99\.0 +100 calls$", text, re.MULTILINE)
    assert re.search(r"^step +\S+ +\S+ +\S+ +\d+ steps$", text, re.MULTILINE)
    assert re.search(r"^section +calls +total ms +share +p50 ms +p95 ms +p99 ms$", text, re.MULTILINE)


def test_what_limits_a_layer_recorded_by_the_user_is_not_guessed() -> None:
    profiler = Profiler()
    for _ in range(100):  # of 1 ms each: the number of executions does not make them tiny calls
        profiler.record_layer_execution("encoder.0", "MyKernel", 0.001)
    (found,) = profiler.report().bottlenecks()
    assert found.why == "MyKernel itself takes 100 % of the recorded time"
    assert profiler.report().recommendations() == ()


def test_layers_recorded_by_the_user_are_in_the_report() -> None:
    profiler = Profiler()
    for seconds in (0.001, 0.003):
        profiler.record_layer_execution("encoder.0", "MyKernel", seconds, 2 * seconds, 100, 40)
    profiler.record_layer_execution("head", "Other", 0.5)
    encoder, head = profiler.report().layers
    assert (encoder.calls, encoder.forward.median_ms, encoder.backward.median_ms) == (2, 2.0, 4.0)
    assert (encoder.memory_bytes, encoder.parameter_bytes) == (100, 40)
    assert not head.backward.is_known
    with pytest.raises(SondeError, match="must be seconds"):
        profiler.record_layer_execution("head", "Other", -1.0)
    with pytest.raises(SondeError, match="memory of 'head' must be a number of bytes"):
        profiler.record_layer_execution("head", "Other", 1.0, None, "1 MB")  # type: ignore[arg-type]
    with pytest.raises(SondeError, match="name and kind of a layer are strings"):
        profiler.record_layer_execution(nn.Linear(1, 1), "Other", 1.0)  # type: ignore[arg-type]
    profiler.clear()
    with pytest.raises(SondeError, match="nothing was measured"):
        profiler.report()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 3}, "takes a torch.nn.Module, not a int"),
        ({"repeats": 0}, "repeats must be a whole number, 1 or more"),
        ({"warmup": -1}, "warmup must be"),
        ({"optimizer": "adam"}, "optimizer must be"),
        ({"inputs": [torch.ones(1, 2), torch.ones(1, 2)]}, "one batch, not a list of 2"),
        ({"loss": lambda y: y}, "must return one number"),
        ({"model": nn.LazyLinear(3)}, "Lazy modules"),
    ],
    ids=["model", "repeats", "warmup", "optimizer", "batches", "loss", "lazy"],
)
def test_bad_arguments_raise_an_error_with_instructions(arguments: dict[str, Any], message: str) -> None:
    arguments = {"model": nn.Linear(2, 2), "inputs": torch.ones(1, 2)} | arguments
    with pytest.raises(SondeError, match=message):
        Profiler().profile(arguments.pop("model"), arguments.pop("inputs"), **arguments)
