"""profile_operations: operations at the lines of the user's code, and a model that is restored."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import sonde  # noqa: E402
from sonde.capture.process_memory import rss  # noqa: E402
from sonde.profiler.operation_report import OperationsReport  # noqa: E402

pytestmark = pytest.mark.torch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(16, 64)
        self.norm = nn.BatchNorm1d(64)
        self.heavy = nn.Sequential(nn.Linear(64, 2048), nn.Dropout(0.1), nn.Linear(2048, 64))
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.widen(x))
        x = self.heavy(x)  # the heavy line
        return self.head(x)


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def data(num: int = 96) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(num, 16), torch.randn(num, 1)), 32, shuffle=True)


def describe_line(text: str) -> str:
    rows = Path(__file__).read_text(encoding="utf-8").split("\n")
    return f"{Path(__file__).name}:{next(number for number, row in enumerate(rows, 1) if text in row)}"


def everything(model: nn.Module) -> list[bytes]:
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[OperationsReport, dict[str, Any]]:
    """A report, and which states were equal before and after it."""
    torch.manual_seed(0)
    model = Net()
    squared(model(torch.randn(8, 16)), torch.randn(8, 1)).backward()  # gradients of the user's own
    loader = data()
    gradients = [p.grad for p in model.parameters()]
    before = [everything(model), torch.get_rng_state().tolist(), random.getstate(), model.training]
    report = sonde.profile_operations(model, loader, 3, loss_fn=squared, output=tmp_path_factory.mktemp("traces"))
    after = [everything(model), torch.get_rng_state().tolist(), random.getstate(), model.training]
    same = {name: a == b for name, a, b in zip(("tensors", "torch", "random", "mode"), before, after)}
    same["gradients"] = all(p.grad is old for p, old in zip(model.parameters(), gradients))
    return report, same


def test_the_model_the_generators_and_the_gradients_are_restored_bit_by_bit(profiled: Any) -> None:
    assert profiled[1] == dict.fromkeys(("tensors", "torch", "random", "mode", "gradients"), True)


def test_operations_are_ordered_by_their_self_time(profiled: Any) -> None:
    times = [one.self_ms for one in profiled[0].operations]
    assert times == sorted(times, reverse=True)
    assert sum(one.share for one in profiled[0].operations) == pytest.approx(1.0)


def test_a_matrix_product_is_reported_at_the_line_that_calls_its_layer(profiled: Any) -> None:
    addmm = next(one for one in profiled[0].operations if one.name == "aten::addmm")
    heavy = [place for place in addmm.places if place.layer.startswith("heavy")]
    assert {place.layer for place in heavy} == {"heavy.0", "heavy.2"}
    assert {place.line for place in heavy} == {describe_line("# the heavy line")}
    assert {place.text for place in heavy} == {"x = self.heavy(x)  # the heavy line"}
    assert {place.shapes for place in heavy} == {"[2048], [32, 64], [64, 2048]", "[64], [32, 2048], [2048, 64]"}


def test_a_backward_operation_is_reported_at_the_line_of_its_forward(profiled: Any) -> None:
    mm = next(one for one in profiled[0].operations if one.name == "aten::mm")
    lines = {place.line for place in mm.places if place.phase == "backward"}
    assert lines >= {describe_line("# the heavy line"), describe_line("return self.head(x)"), describe_line("x = self.norm(")}


def test_flops_and_calls_are_those_of_one_batch(profiled: Any) -> None:
    addmm = next(one for one in profiled[0].operations if one.name == "aten::addmm")
    assert addmm.calls == 4
    assert addmm.flops == 2 * 32 * (16 * 64 + 64 * 2048 + 2048 * 64 + 64 * 1)


def test_memory_is_the_allocations_of_the_operations(profiled: Any) -> None:
    addmm = next(one for one in profiled[0].operations if one.name == "aten::addmm")
    assert addmm.memory_bytes == 4 * 32 * (64 + 2048 + 64 + 1)
    assert profiled[0].peak_bytes > addmm.memory_bytes


def test_the_loss_and_the_loader_have_phases_of_their_own(profiled: Any) -> None:
    places = [place for one in profiled[0].operations for place in one.places]
    assert {place.phase for place in places} == {"data", "forward", "loss", "backward"}
    assert describe_line("return (output - target)") in {place.line for place in places}
    assert not [place for place in places if "profile_operations" in place.text]


def test_the_trace_is_named_for_tensorboard_and_has_the_events_that_perfetto_shows(profiled: Any) -> None:
    trace = profiled[0].trace
    assert trace.name.endswith(".pt.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    kinds = {event.get("cat") for event in events if event["ph"] == "X"}
    assert kinds >= {"cpu_op", "python_function", "user_annotation"}
    product = next(event for event in events if event.get("name") == "aten::addmm")
    assert product["args"]["Input Dims"]
    assert {"forward", "loss", "backward"} <= {event["name"] for event in events}


def test_a_summary_has_the_operations_and_the_lines(profiled: Any) -> None:
    text = profiled[0].summary()
    assert text.startswith("operations of Net: 3 batches, ")
    assert "aten::addmm" in text
    assert "x = self.heavy(x)  # the heavy line" in text
    assert "aten::addmm" in profiled[0]._repr_html_()
    json.dumps(profiled[0].to_dict(), allow_nan=False)


def test_a_session_writes_the_trace_beside_its_run_and_updates_the_model_only_with_an_optimizer(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = everything(model)
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        report = session.profile_model_performance(data(), 1)
        assert everything(model) == before
        session.profile_model_performance(data(), 1, loss_fn=nn.MSELoss(), optimizer=optimizer, output=tmp_path / "elsewhere")
        assert everything(model) != before
    assert "no loss_fn was given: the backward started at the mean of the outputs" in report.notes
    assert report.trace is not None
    assert report.trace.parent == tmp_path / "run" / "operations"
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1
    assert sonde.Run(tmp_path / "run").last_step == -1  # the session did not record them as training steps


def test_dicts_are_keyword_arguments_and_a_model_may_return_its_loss() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": (self.layer(x) - labels).square().mean(), "logits": x}

    batches = [{"x": torch.randn(2, 4), "labels": torch.randn(2, 1)}]
    report = sonde.profile_operations(Own(), batches, 1)
    assert report.notes == ("the model was in train mode",)
    assert any(one.name == "MeanBackward0" for one in report.operations)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((nn.Linear(1, 1), iter([torch.zeros(1, 1)] * 3), 1), "the loader gave 3 batches; 3 are needed to warm up"),
        ((nn.Linear(1, 1), [], 1), "the loader gave 0 batches"),
        ((torch.zeros(1), [], 1), "needs a torch.nn.Module, not Tensor"),
        ((nn.Linear(1, 1), [], 0), "num_batches must be a whole number from 1 on, not 0"),
    ],
    ids=["too-short", "empty", "no-model", "no-batches"],
)
def test_bad_arguments_of_profile_operations_raise_an_error(arguments: Any, message: str) -> None:
    with pytest.raises(sonde.SondeError, match=message):
        sonde.profile_operations(*arguments)


def test_an_error_of_the_model_reaches_the_user_and_the_model_is_restored() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    before = everything(model)
    with pytest.raises(RuntimeError, match="running_mean should contain 5 elements"):
        sonde.profile_operations(model, [torch.randn(3, 4), torch.randn(3, 5)], 2)
    assert everything(model) == before


def test_memory_does_not_grow_with_the_number_of_batches(tmp_path: Path) -> None:
    """torch.profiler alone needs more than a megabyte for each batch of this model."""
    memory: list[int] = []

    class Loader:
        def __iter__(self) -> Iterator[Tensor]:
            for _ in range(20):
                memory.append(rss() or 0)
                yield torch.randn(8, 16)

    report = sonde.profile_operations(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)), Loader(), 75, output=tmp_path)
    assert report.num_batches == 75
    assert len(memory) == 75 + 2 + 8  # two wait, and one warms up for every ten
    assert max(memory[30:]) - max(memory[:30]) < 10e6
    (linear,) = [one for one in report.operations if one.name == "aten::linear"]
    assert linear.calls == 2.0
    assert "the trace has the first 10 of 75 batches: a longer one is slow to open and large" in report.notes
    with gzip.open(report.trace, "rt", encoding="utf-8") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert len({name for name in names if name.startswith("ProfilerStep#")}) == 10


def test_a_large_model_is_recorded_in_smaller_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sonde.profiler.profile_operations.MAX_EVENTS", 500)  # one batch of this model has more
    batches = iter([torch.randn(2, 16) for _ in range(40)])
    report = sonde.profile_operations(nn.Sequential(*(nn.Linear(16, 16) for _ in range(8))), batches, 13)
    assert report.num_batches == 13
    assert 40 - len(list(batches)) == 2 + (1 + 10) + 3 * (1 + 1)  # the first part has ten batches, each further one a single batch
    (linear,) = [one for one in report.operations if one.name == "aten::linear"]
    assert linear.calls == 8.0


def test_a_loader_that_ends_is_noted_with_what_was_measured() -> None:
    report = sonde.profile_operations(nn.Linear(4, 1), iter([torch.randn(2, 4)] * 16), 30)
    assert report.num_batches == 16 - 2 - 1 - 1
    assert "the loader ended after 12 of 30 batches" in report.notes


@pytest.mark.parametrize("loader", [None, 3])
def test_profiling_a_session_without_a_loader_is_refused_with_a_sentence(loader: Any, tmp_path: Path) -> None:
    with sonde.watch(nn.Linear(4, 1), to=tmp_path / "run") as session, pytest.raises(sonde.SondeError, match="loader must be a DataLoader"):
        session.profile_model_performance(loader)
