"""MemoryProfiler: memory by owner, which adds up to the counts of the allocator; forecasts for other sizes; leaks."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from sonde import MemoryProfiler, Run, SondeError, watch
from sonde.capture import process_memory
from sonde.capture.training_callbacks import suspended
from sonde.memory_profiler import CATEGORIES, MemoryReport, from_dict
from sonde.tools.loop_debugger.find_nan_operation import RandomState, find_cause

pytestmark = [pytest.mark.torch, pytest.mark.timing]  # measures the memory of the whole process: no other test may run in it
F = nn.functional


class Attention(nn.Module):
    def __init__(self, vocabulary: int = 500, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(32, 64, 2, batch_first=True)
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


CASES = {
    "mlp": (mlp, lambda n: torch.randn(n, 256)),
    "conv": (conv, lambda n: torch.randn(n, 3, 16, 16)),
    "attention": (Attention, lambda n: torch.randint(0, 500, (n, 32))),
    "lstm": (Recurrent, lambda n: torch.randn(n, 24, 32)),
}


def loss_of(output):
    flat = output.reshape(-1, output.shape[-1])
    return F.cross_entropy(flat, torch.zeros(len(flat), dtype=torch.long))


def train(model, optimizer, x, num_steps=2):
    for _ in range(num_steps):
        optimizer.zero_grad()
        output = model(x)
        loss = loss_of(output)
        loss.backward()
        optimizer.step()


# Scratch memory inside an operation belongs to no tensor: in the LSTM of oneDNN it is an eighth of the peak.
SCRATCH = {"mlp": 0.05, "conv": 0.05, "attention": 0.05, "lstm": 0.15}


@pytest.mark.parametrize("case", CASES)
def test_the_categories_add_up_to_the_counts_of_torchs_allocator(case):
    make, batch = CASES[case]
    torch.manual_seed(0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as truth:
        before = live_bytes()
        model = make()
        optimizer = torch.optim.Adam(model.parameters())
        x = batch(32)
        with MemoryProfiler(model, optimizer) as profiler:
            train(model, optimizer, x)
            now = profiler.snapshot("now").usage["cpu"].by_category()
        report = profiler.report()
    alive, highest = (before + num for num in allocated(truth))
    assert set(now) == set(CATEGORIES)
    assert sum(now.values()) == pytest.approx(alive, rel=0.05)
    assert sum(report.by_category().values()) == pytest.approx(highest, rel=SCRATCH[case])


def live_bytes() -> int:
    snapshot = MemoryProfiler().snapshot("before")
    return sum(usage.total for usage in snapshot.usage.values())


def allocated(truth) -> tuple[int, int]:
    """Final and highest number of bytes, from every allocation of the CPU allocator that torch.profiler recorded."""
    now = highest = 0
    for event in sorted(truth.profiler.kineto_results.experimental_event_tree() or [], key=lambda one: one.start_time_ns):
        for alloc in allocations(event):
            now += alloc
            highest = max(highest, now)
    return now, highest


def allocations(event):
    if hasattr(event.extra_fields, "alloc_size"):
        yield event.extra_fields.alloc_size
    for child in sorted(event.children, key=lambda one: one.start_time_ns):
        yield from allocations(child)


@pytest.mark.skipif(process_memory.heap() is None, reason="this malloc has no statistics")
def test_live_tensors_add_up_to_the_counts_of_malloc():
    model, x = mlp(), torch.randn(1024, 256)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, x, 1)  # torch loads libraries in the first step
    stored = []
    with MemoryProfiler(model, optimizer) as profiler:
        train(model, optimizer, x, 1)
        stored.append(torch.zeros(8 << 20))
        device = profiler.report().on("cpu")
    assert device.unaccounted is not None
    assert abs(device.unaccounted) < 0.05 * device.now.total
    assert device.now.total > 32 << 20
    assert 0 <= device.fragmentation < 1


def test_memory_is_attributed_to_its_modules():
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8, bias=False))
    optimizer = torch.optim.Adam(model.parameters())
    with MemoryProfiler(model, optimizer) as profiler:
        train(model, optimizer, torch.randn(128, 64))
        now = profiler.report().on().now.by_module()
    assert now["0"] == {"parameters": 4 * (64 * 512 + 512), "gradients": 4 * (64 * 512 + 512), "optimizer state": 8 * (64 * 512 + 512) + 8}
    assert now["2"]["optimizer state"] == 8 * 512 * 8 + 4
    assert profiler.report().by_module()["1"]["activations"] == 4 * 128 * 512


def test_a_model_that_was_not_passed_is_found_when_it_is_called():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with MemoryProfiler() as profiler:
        train(model, optimizer, torch.randn(16, 256))
    report = profiler.report()
    assert report.batch_size == 16
    assert report.num_steps == 2
    assert {"0", "2", "4"} <= set(report.by_module())


def test_checkpointed_activations_are_not_counted():
    from torch.utils.checkpoint import checkpoint

    blocks = [nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64), nn.Tanh()) for _ in range(6)]
    body, head = nn.Sequential(*blocks), nn.Linear(64, 4)
    x = torch.randn(512, 64, requires_grad=True)
    peaks = {}
    for again in (False, True):
        with MemoryProfiler(nn.ModuleList([body, head])) as profiler:
            h = x
            for block in body:
                h = checkpoint(block, h, use_reentrant=False) if again else block(h)
            head(h).sum().backward()
            del h
        peaks[again] = profiler.report().by_category()["activations"]
    assert peaks[True] < 0.6 * peaks[False]


def test_a_part_that_is_called_alone_keeps_its_name():
    from torch.utils.checkpoint import checkpoint

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.block = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 64), nn.Tanh())

        def forward(self, x):
            return checkpoint(self.block, self.stem(x), use_reentrant=False)

    model = Whole()
    with MemoryProfiler() as profiler:
        model(torch.randn(4, 16)).sum().backward()
        model.block(torch.randn(4, 16)).sum().backward()
        now = profiler.report().on().now.by_module()
    assert now["block.0"]["gradients"] == now["block.0"]["parameters"] == 4 * (16 * 64 + 64)


@pytest.mark.parametrize("case", CASES)
def test_a_forecast_is_close_to_the_measured_peak_at_four_times_the_batch(case):
    make, batch = CASES[case]
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    forecast = MemoryProfiler().forecast(model, batch(16), batch_size=64, loss=loss_of, optimizer=optimizer)
    x = batch(64)
    with MemoryProfiler(model, optimizer) as profiler:
        others = profiler.snapshot("before").usage["cpu"].by_category()["other"] - x.nbytes
        train(model, optimizer, x)
    truth = profiler.report().peak_gb() * 1e9 - others
    assert forecast.peak_bytes == pytest.approx(truth, rel=0.1)
    assert forecast.error_share < 0.1
    assert (forecast.size, forecast.measured_size) == (64, 16)


def test_a_forecast_for_a_sequence_length_includes_quadratic_attention():
    class Quadratic(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(8, 8)

        def forward(self, x):
            h = self.project(x)
            return (h @ h.transpose(1, 2)).softmax(-1) @ h

    model = Quadratic()
    profiler = MemoryProfiler()
    short, long = (profiler.forecast(model, torch.randn(2, 64, 8), sequence_length=n).peak_bytes for n in (256, 512))
    assert 3.5 < long / short < 4.1


def test_if_fake_tensors_cannot_be_used_real_steps_are_measured_and_fitted():
    class ThroughNumpy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 2048)

        def forward(self, x):
            return self.linear(torch.from_numpy(x.detach().numpy() * 2.0))

    model = ThroughNumpy()
    forecast = MemoryProfiler().forecast(model, torch.randn(64, 32), batch_size=256)
    real = MemoryProfiler(model)
    with real:
        others = real.snapshot("before").usage["cpu"].by_category()["other"]
        for _ in range(2):
            model.zero_grad()
            output = model(torch.randn(256, 32))
            output.sum().backward()
    assert "real steps" in forecast.how
    assert forecast.peak_bytes == pytest.approx(real.report().on().peak.usage.total - others, rel=0.1)


def test_forecasting_changes_neither_the_model_nor_the_random_state():
    model = Attention()
    tokens = torch.randint(0, 500, (4, 16))
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    MemoryProfiler().forecast(model, tokens, batch_size=8)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_training_is_bit_identical_under_measurement_and_all_hooks_are_removed():
    results = []
    for measured in (False, True):
        torch.manual_seed(7)
        model = Attention()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x = torch.randint(0, 500, (8, 16))
        profiler = MemoryProfiler(model, optimizer)
        if measured:
            profiler.start()
        train(model, optimizer, x, 3)
        if measured:
            profiler.stop()
        results.append([value.clone() for value in model.state_dict().values()] + [torch.get_rng_state()])
    assert all(torch.equal(one, other) for one, other in zip(*results))
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not nn.modules.module._global_forward_pre_hooks


def test_a_leak_is_reported_with_the_variable_that_holds_it():
    history = []
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryProfiler(model, optimizer) as profiler:
        for _ in range(14):
            output = model(torch.randn(64, 64))
            output.sum().backward()
            optimizer.step()
            history.append(output)
        leaks = profiler.report().leaks()
    assert leaks
    assert "local 'history'" in leaks[0].holder
    assert "detach" in leaks[0].fix


def test_snapshots_count_live_tensors_without_a_start():
    profiler, first = MemoryProfiler(), torch.zeros(1)
    before = profiler.snapshot("before").usage["cpu"].total
    allocated = torch.zeros(1 << 20)
    after = profiler.snapshot("after").usage["cpu"].total
    assert after - before == allocated.nbytes
    assert before >= first.nbytes
    report = profiler.report()
    assert [one.label for one in report.snapshots] == ["before", "after"]
    assert "only snapshots" in report.summary()


def test_a_summary_says_how_many_snapshots_it_does_not_show():
    profiler = MemoryProfiler()
    large = torch.zeros(1 << 22)
    for number in range(13):
        profiler.snapshot(f"step {number}")
        if number == 1:
            del large
    text = " ".join(profiler.report().summary().split())
    assert "step 12:" in text
    assert "3 earlier ones not shown here, the largest is step 0:" in text
    assert "report.snapshots has all 13" in text
    profiler.clear()
    for number in range(10):
        profiler.snapshot(f"step {number}")
    assert "not shown" not in profiler.report().summary()


def test_clear_discards_all_measurements_and_a_running_one_starts_again():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(8, 256)
    profiler = MemoryProfiler(model, optimizer)
    with profiler:
        train(model, optimizer, x, 3)
        profiler.snapshot("first")
        profiler.clear()
        assert not profiler.report().snapshots
        train(model, optimizer, x, 2)
    assert profiler.report().num_steps == 2
    assert "0" in profiler.report().by_module()
    profiler.clear()
    with pytest.raises(SondeError, match="nothing was measured"):
        profiler.report()
    assert not model._forward_hooks
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_the_timeline_is_bounded_and_reaches_the_peak():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryProfiler(model, optimizer) as profiler:
        train(model, optimizer, torch.randn(8, 256), 16)
    timeline = profiler.report().timeline()
    assert 100 < len(timeline) <= 1024
    assert max(point.total for point in timeline) == profiler.report().on().peak.usage.total


def test_the_profiler_of_a_session_stops_with_it_and_its_forecasts_are_not_recorded(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(8, 256)
    with watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        session.memory_profiler.start()
        train(model, optimizer, x, 3)
        forecast = session.memory_profiler.forecast(inputs=x, batch_size=16)
        train(model, optimizer, x, 2)
        tool = session.memory_profiler
    assert forecast.size == 16
    assert tool.report().num_steps == 5
    assert "0" in tool.report().by_module()
    assert Run(tmp_path / "run").last_step == 4
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


@pytest.fixture(scope="module")
def report() -> MemoryReport:
    model = conv()
    optimizer = torch.optim.Adam(model.parameters())
    with MemoryProfiler(model, optimizer) as profiler:
        train(model, optimizer, torch.randn(16, 3, 32, 32))
        profiler.snapshot("trained")
    return profiler.report()


def test_a_report_is_restored_from_json(report):
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    again = from_dict(document)
    assert again == report
    with pytest.raises(SondeError, match="damaged"):
        from_dict({**document, "devices": {"cpu": {}}})
    with pytest.raises(SondeError, match="not a memory report"):
        from_dict({"format": "something"})


def test_the_timeline_is_plotted_and_its_data_is_available(report, tmp_path):
    pytest.importorskip("matplotlib")
    picture = report.plot()
    assert picture.save(tmp_path / "memory.png").stat().st_size > 5000
    assert set(picture.data["bytes"]) == set(CATEGORIES)
    assert len(picture.data["time_s"]) == len(report.timeline())
    assert report.plot("cpu").data["snapshots"].keys() == {"trained"}


def test_a_summary_fits_into_eighty_columns(report):
    text = report.summary().split("\n\n")
    tables = "\n".join(text[1:3])
    assert max(map(len, tables.splitlines())) <= 80
    assert "activations" in tables
    assert "<table>" in report._repr_html_()


def test_a_report_forecasts_the_peak_of_another_batch(report):
    double = report.forecast(32)
    assert 1.2 < double.peak_bytes / report.on().peak.usage.total < 2.05
    fits = report.largest_batch(limit=4 * report.on().peak.usage.total)
    assert report.forecast(fits).peak_bytes == pytest.approx(4 * report.on().peak.usage.total, rel=0.1)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda: MemoryProfiler(3), "torch.nn.Module"),
        (lambda: MemoryProfiler().report(), "start"),
        (lambda: MemoryProfiler().forecast(mlp(), torch.randn(4, 256)), "either batch_size"),
        (lambda: MemoryProfiler().forecast(mlp(), torch.randn(4, 256), batch_size=0), "1 or more"),
        (lambda: MemoryProfiler().forecast(mlp(), torch.randn(4), sequence_length=9), "dimension"),
        (lambda: MemoryProfiler().forecast(mlp(), torch.randn(4, 99), batch_size=9), "Are these its inputs"),
    ],
    ids=["model", "nothing", "neither", "zero", "no-sequence", "wrong-shape"],
)
def test_misuse_raises_an_error_with_instructions(misuse, message):
    with pytest.raises(SondeError, match=message):
        misuse()


def test_starting_twice_raises_an_error_and_the_measurement_continues():
    with MemoryProfiler() as profiler:
        with pytest.raises(SondeError, match="is running already"):
            profiler.start()
        torch.zeros(10)
    assert profiler.report().devices


def test_meta_tensors_are_not_counted() -> None:
    shapes = torch.empty(1000, device="meta")
    model = nn.Linear(8, 8)
    with MemoryProfiler(model) as profiler:
        model(torch.randn(4, 8) + shapes.numel()).sum().backward()
    assert list(profiler.report().devices) == ["cpu"]


def test_steps_that_a_tool_takes_by_itself_are_not_steps_of_the_training() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    profiler = MemoryProfiler(model, optimizer).start()
    for is_tool in (False, True, False):
        with suspended() if is_tool else nullcontext():
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert profiler.stop().num_steps == 2


def test_a_running_memory_profiler_is_not_taken_for_a_session() -> None:
    model = nn.Linear(4, 1)
    with MemoryProfiler(model):
        cause = find_cause([model], RandomState(), lambda: (model(torch.ones(2, 4)) * float("inf")).sum())
    assert not isinstance(cause, str)


def test_a_peak_before_the_training_is_said_to_be_there():
    model = nn.Linear(4, 2)
    with MemoryProfiler(model) as profiler:
        large = torch.ones(100_000) + 1
        model(torch.ones(3, 4)).sum().backward()
    assert large.numel() == 100_000
    assert ", outside of the model and the optimizer (aten." in " ".join(profiler.report().summary().split())
