"""When a spike is attributed and a skipped update explained, how often, and what that costs a healthy step."""

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import sonde  # noqa: E402
from sonde import Run  # noqa: E402
from sonde.capture.incident_types import SpikeIncident  # noqa: E402
from sonde.capture.probes.finite_check import MAX_OPTIMIZERS, FiniteCheck  # noqa: E402
from sonde.capture.probes.loss import LossProbe  # noqa: E402
from sonde.incidents.skipped_update_handler import MAX_RECORDED  # noqa: E402
from sonde.incidents.spike_handler import MAX_SEARCHES  # noqa: E402
from step_trackers import new_tracker  # noqa: E402


def train(path, *, odd=(), steps=50, kind=torch.optim.SGD, lr=0.01, scaler=None, bad=()):
    """A regression whose targets are odd in some steps and whose gradients are bad in others; answers with the events of the run."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = kind(model.parameters(), lr=lr)
    with sonde.watch(model, optimizer, to=path, strict=True):
        for step in range(steps):
            x = torch.randn(8, 4)
            y = x[:, :1] + (1e3 if step in odd else 0.0) * F.one_hot(torch.tensor(2), 8)[:, None]
            loss = F.mse_loss(model(x), y)
            if step in bad:
                loss = loss + (model[0].weight * 0).square().sum().sqrt()  # a root at zero: its slope is not finite
            optimizer.zero_grad()
            if scaler is None:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    return list(Run(path).events())


def of(events, kind):
    return [event for event in events if event.kind == kind]


def test_a_few_spikes_are_attributed_and_the_rest_is_left_to_the_rules(tmp_path):
    odd = [60, 90, 120, 150, 180]
    found = of(train(tmp_path / "run", odd=odd, steps=190), "spike")
    assert [event.step for event in found] == odd[:MAX_SEARCHES]
    assert all(event.data["samples"] == [2] for event in found)
    (finding,) = [one for one in sonde.diagnose(tmp_path / "run").findings if one.rule == "loss-spike"]
    assert finding.evidence["num_leaps"] == len(odd)


def test_the_first_steps_are_never_spikes(tmp_path):
    assert not of(train(tmp_path / "run", odd=[1, 5, 12, 25], steps=30), "spike")


def test_a_loss_and_a_gradient_that_spike_in_the_same_step_are_one_search(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
        for step in range(42):
            x = torch.randn(8, 4)
            loss = (model(x) - (1e4 if step == 40 else 1.0)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (found,) = Run(tmp_path / "run").events("spike")
    assert found.data["what"] == "loss"


class Spikes:
    """The two probes that find spikes, called with the numbers of a training as the step tracker calls them."""

    def __init__(self, folder):
        self.tracker = new_tracker(folder)
        self.losses, self.gradients = self.tracker.probe(LossProbe), self.tracker.probe(FiniteCheck)
        self.model = nn.Linear(1, 1, bias=False)
        self.optimizer = self.new_optimizer()
        self.found = []

    def new_optimizer(self):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.tracker.add_optimizer(optimizer)
        return optimizer

    def step(self, loss, sum_of_squares, *, index=0):
        """A step with this loss and these gradients, of the optimizer that was registered with this number."""
        state, entry = self.tracker.state, self.tracker.gradients.register(self.optimizer)
        incidents = [self.losses.on_backward_start(torch.tensor(loss))]
        entry.index = index
        state.optimizer, state.gradient_check = entry, (self.optimizer, (sum_of_squares, -1))
        incidents.append(self.gradients.on_optimizer_step_start(self.optimizer, False))
        state.optimizer = None
        for probe in (self.losses, self.gradients):
            probe.reset()
        self.found += [(each.what, each.leap.value) for each in incidents if isinstance(each, SpikeIncident)]


@pytest.fixture
def spikes(tmp_path):
    spikes = Spikes(tmp_path)
    yield spikes
    spikes.tracker.recorder.writer.close()


def test_after_a_new_optimizer_numbers_are_not_compared_with_those_before(spikes):
    for step in range(60):
        spikes.step(1.0 + 0.01 * (step % 5), 1.0 + 0.01 * (step % 5))
    spikes.optimizer = spikes.new_optimizer()
    spikes.step(1e6, 1e12)
    assert spikes.found == []


def test_numbers_that_are_not_there_or_not_finite_are_no_spikes_and_spoil_nothing(spikes):
    for step in range(60):
        for number in (float("nan"), float("inf"), float("-inf")):
            spikes.step(number, number, index=1)
        spikes.step(1.0 + 0.01 * (step % 5), 0.0, index=1)
        spikes.step(1.0 + 0.01 * (step % 5), 4.0 + 0.01 * (step % 5), index=1)
    assert spikes.found == []
    spikes.step(1e6, 1e12, index=1)
    assert spikes.found == [("loss", 1e6), ("gradient", pytest.approx(1e6))]


def test_optimizers_without_end_take_no_more_memory(spikes):
    for index in range(500):
        spikes.step(1.0, 1.0, index=index)
    assert len(spikes.gradients._recent_norms) == MAX_OPTIMIZERS


def test_finding_spikes_costs_no_operation_of_torch(spikes):
    class Counting(TorchDispatchMode):
        num = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Counting.num += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        for step in range(200):
            spikes.losses._check_spike("loss", 1.0 + 0.1 * (step % 7))
            spikes.gradients._check_spike(0, 1.0 + 0.1 * (step % 7))
    assert Counting.num == 0


# -- GradScaler ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, lambda p, lr: torch.optim.Adam(p, lr=lr, fused=True)], ids=["plain", "fused"])
def test_a_skipped_update_records_what_overflowed_and_the_scale_before_and_after(kind, tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    (found,) = of(train(tmp_path / "run", steps=6, kind=kind, scaler=scaler, bad=[3]), "overflow")
    assert found.step == 3
    assert (found.data["where"], found.data["num_bad"], found.data["num_parameters"]) == ("0.weight", 1, 4)
    assert (found.data["scale"], found.data["scale_after"]) == (2.0**16, 2.0**15)
    assert scaler.get_scale() == 2.0**15


def test_gradients_that_are_bad_without_a_scale_are_distinguished_from_those_that_overflow(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    found = of(train(tmp_path / "run", steps=30, scaler=scaler, bad=range(4, 30)), "overflow")
    assert len(found) <= MAX_RECORDED + 2
    (first, *_) = [event.data for event in found if "by" in event.data]
    assert first["by"] == "number"
    assert (first["origin"]["operation"], first["origin"]["phase"]) == ("sqrt", "backward")
    assert "sqrt()" in first["origin"]["text"]


def test_a_number_that_only_the_scale_makes_overflow_is_traced_in_half_precision(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(16, 8)
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(x)
            loss = 4e3 * out.float().sum()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    found = [event.data for event in Run(tmp_path / "run").events("overflow")]
    assert found[0]["by"] == "scale"
    assert found[0]["origin"]["key"] == "fp16-overflow"


def test_training_with_explained_skipped_updates_is_bit_identical(tmp_path):
    def trained(watched):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

        def steps():
            for step in range(20):
                loss = F.mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 1))
                if 4 <= step < 12:
                    loss = loss + (model[0].weight * 0).square().sum().sqrt()
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()

        if watched:
            with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
                steps()
        else:
            steps()
        return [*(tensor.tolist() for tensor in model.state_dict().values()), torch.get_rng_state().tolist(), scaler.state_dict()]

    assert trained(True) == trained(False)
    assert any("by" in event.data for event in Run(tmp_path / "run").events("overflow"))


def test_a_loss_on_a_device_is_known_too_late_for_a_replay_but_the_rule_finds_it(tmp_path, monkeypatch):
    monkeypatch.setattr("sonde.statistics.batched_device_reads.TREAT_CPU_AS_DEVICE", True)
    monkeypatch.setattr("sonde.statistics.native_extension.ENABLED", False)
    assert not of(train(tmp_path / "run", odd=[60], steps=80), "spike")
    (finding,) = [one for one in sonde.diagnose(tmp_path / "run").findings if one.rule == "loss-spike"]
    assert finding.step == 60
