"""The origin of a non-finite number in a real training is found, and the training continues unchanged."""

import hashlib
import os

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import sonde  # noqa: E402
from sonde import DebugConfig, Origin, Run  # noqa: E402


class Net(nn.Module):
    """A model with every kind of state that a replay could change: running statistics, dropout, spectral norm, buffers, attributes."""

    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 3)
        self.calls = []
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x):
        h = self.drop(torch.relu(self.norm(self.first(x))))
        self.average.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        self.calls.append(len(x))
        out, _ = self.gru(h[:, None])
        return self.head(out[:, 0]) + self.average.sum()


def batch(step, bad):
    x, y = torch.randn(12, 6), torch.randint(0, 3, (12,))
    weight = torch.ones(12)
    if step == 3 and bad == "loss":
        weight[4] = 0.0
    return x, y, weight


def weighted(out, y, weight):
    return (F.cross_entropy(out, y, reduction="none") / weight).mean()


def train(model, optimizer, bad, *, steps=6):
    """Trains some steps with one non-finite loss; its non-finite gradients are set to 0 before the update."""
    losses = []
    for step in range(steps):
        x, y, weight = batch(step, bad)
        loss = weighted(model(x), y, weight)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def state(model, optimizer, losses):
    numbers = [tensor.detach().numpy().tobytes() for tensor in model.state_dict().values()]
    moments = [value.numpy().tobytes() for slot in optimizer.state.values() for value in slot.values() if isinstance(value, torch.Tensor)]
    parts = (numbers, moments, torch.get_rng_state().numpy().tobytes(), repr(losses), model.calls)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def origins(path):
    return [Origin.from_dict(event.data) for event in Run(path).events() if event.kind == "origin"]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_training_with_a_replayed_step_is_bit_identical_to_unwatched_training(kind, tmp_path):
    def outcome(watched):
        torch.manual_seed(11)
        model = Net()
        optimizer = kind(model.parameters(), lr=0.05)
        if not watched:
            return state(model, optimizer, train(model, optimizer, "loss"))
        with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
            return state(model, optimizer, train(model, optimizer, "loss"))

    assert outcome(True) == outcome(False)
    (found,) = origins(tmp_path / "run")
    assert (found.operation, found.key, found.samples) == ("div", "division-by-zero", (4,))
    assert "/ weight" in found.text


def test_no_tensor_of_the_bad_step_is_kept_alive(tmp_path):
    import weakref

    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run"):
        x = torch.ones(4, 3)
        reference = weakref.ref(x)
        loss = torch.log(model(x).sum() * 0)
        loss.backward()
        optimizer.step()
        del x, loss
        assert reference() is None
    assert origins(tmp_path / "run")[0].operation == "log"


def test_a_bad_gradient_of_a_finite_loss_is_traced_to_the_line_of_the_forward(tmp_path):
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 4)
    x[5] = 0
    with sonde.watch(model, optimizer, to=tmp_path / "run"):
        length = model(x).pow(2).sum(1).sqrt()
        loss = length.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    (found,) = origins(tmp_path / "run")
    assert (found.phase, found.operation, found.samples) == ("backward", "sqrt", (5,))
    assert found.text.startswith("length = model(x)")


def test_raise_stops_before_the_update_and_carries_the_origin(tmp_path):
    model = nn.Linear(3, 1)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = DebugConfig(anomaly_detection_mode="raise")
    with sonde.watch(model, optimizer, to=tmp_path / "run", config=config):
        loss = torch.log(model(torch.ones(4, 3)) * 0).mean()
        with pytest.raises(sonde.NonFiniteError, match="log") as caught:
            loss.backward()
    assert caught.value.origin.operation == "log"
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_warn_logs_one_line_and_the_training_continues(tmp_path, caplog):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run"):
        for _ in range(3):
            loss = torch.log(model(torch.ones(4, 3)) * 0).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert len([record for record in caplog.records if "is not finite" in record.message]) == 1


def test_a_step_that_cannot_be_run_again_is_explained_by_the_graph_with_the_reason(tmp_path):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stream = iter([torch.log(torch.zeros(4, 1))])
    with sonde.watch(model, optimizer, to=tmp_path / "run"):
        loss = (torch.log(model(torch.ones(4, 3)) * 0) * next(stream)).mean()
        loss.backward()
        optimizer.step()
    (found,) = origins(tmp_path / "run")
    assert (found.how, found.operation) == ("graph", "log")
    assert any("next()" in caveat or "finite" in caveat for caveat in found.caveats)


def test_a_loss_that_overflows_only_because_of_its_scale_is_left_to_the_grad_scaler(tmp_path):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with sonde.watch(model, optimizer, to=tmp_path / "run"):
        for _ in range(8):
            loss = (model(torch.ones(4, 3)) - 40).pow(2).mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert not origins(tmp_path / "run")
    assert not [event for event in Run(tmp_path / "run").events() if event.kind == "origin_unknown"]


def test_a_hidden_state_that_the_loop_carries_is_taken_from_the_recorded_call(tmp_path):
    model = nn.GRUCell(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run"):
        h = torch.zeros(5, 3)
        for step in range(4):
            h = model(torch.randn(5, 3), h)
            loss = (h / (0.0 if step == 2 else 1.0)).mean()
            optimizer.zero_grad()
            loss.backward()
            h = h.detach()
            if step == 2:
                break
            optimizer.step()
    (found,) = origins(tmp_path / "run")
    assert found.operation == "div"


def test_a_capsule_of_the_bad_step_is_saved_if_configured(tmp_path):
    pytest.importorskip("safetensors")
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    y = torch.ones(4, 1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", config=DebugConfig(save_debug_info=True)):
        loss = (torch.log(model(torch.ones(4, 3)) * 0) - y).mean()
        loss.backward()
    (event,) = [event for event in Run(tmp_path / "run").events() if event.kind == "origin"]
    assert (tmp_path / "run" / event.data["capsule"] / "capsule.json").exists()


def test_a_bad_batch_before_a_batch_norm_is_the_origin_and_not_the_running_statistics(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    bad = torch.randn(8, 4)
    bad[5, 2] = float("nan")
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
        for x in [bad]:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
    assert not model[1].running_mean.isfinite().any()
    (found,) = origins(tmp_path / "run")
    assert (found.phase, found.samples) == ("input", (5,)), found
    assert "running_mean" not in found.cause


def test_the_event_of_a_bad_number_is_on_disk_before_the_replay(tmp_path):
    """The process may be killed during the replay."""
    training_process = os.getpid()

    class Watching(nn.Linear):
        def forward(self, x):
            if os.getpid() != training_process:  # in the replay
                raise RuntimeError(f"on disk: {[event.data['what'] for event in Run(tmp_path / 'run').events('nonfinite')]}")
            return super().forward(x)

    model = Watching(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
        for x in [torch.ones(2, 4)]:
            loss = torch.log(model(x).sum() * 0)
            loss.backward()
            optimizer.step()
    found = [event.data for event in Run(tmp_path / "run").events() if event.kind in ("origin", "origin_unknown")]
    assert "on disk: ['loss']" in str(found)


@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "Module.compile"])
def test_the_replay_of_a_compiled_model_notes_that_it_ran_without_compiling(in_place, tmp_path):
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    compiled = model if in_place else torch.compile(model, backend="eager")
    if in_place:
        model.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    weight = torch.ones(8)
    weight[2] = 0.0
    with sonde.watch(compiled, optimizer, to=tmp_path / "run", strict=True):
        for x in [torch.randn(8, 4)]:
            loss = (compiled(x).square().sum(1) / weight).mean()
            loss.backward()
            optimizer.step()
    (found,) = origins(tmp_path / "run")
    assert (found.operation, found.samples) == ("div", (2,))
    assert [note for note in found.caveats if "without compiling" in note]
