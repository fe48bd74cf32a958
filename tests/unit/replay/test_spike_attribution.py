"""A spike in a real training is attributed to its samples, and the training continues unchanged."""

import hashlib
import weakref

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import sonde  # noqa: E402
from sonde import Run  # noqa: E402
from sonde.replay.spike_attribution import find_deviating_layer, layer_magnitudes, sample_magnitudes  # noqa: E402

SPIKE = 45  # the step of the spike; the usual value is known by then


def spikes(path):
    return [event.data for event in Run(path).events("spike")]


def regression(num=16):
    x = torch.randn(num, 6)
    return x, x[:, :1] * 2 + 0.1 * torch.randn(num, 1)


def mlp(**more):
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))


@pytest.fixture
def watched(tmp_path):
    """`watched(model, step_of)` trains some steps under a session and returns the spikes of its run."""

    def train(model, step_of, *, steps=SPIKE + 3, lr=0.01, kind=torch.optim.SGD):
        torch.manual_seed(1)
        optimizer = kind(model.parameters(), lr=lr)
        with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
            for step in range(steps):
                step_of(step, optimizer)
        return spikes(tmp_path / "run")

    return train


def test_a_wrong_target_is_named_with_the_loss_without_it(watched):
    model = mlp()

    def step_of(step, optimizer):
        x, y = regression()
        if step == SPIKE:
            y[5] = 900.0
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    (found,) = watched(model, step_of)
    assert (found["what"], found["samples"], found["blame"], found["odd"]["name"]) == ("loss", [5], "target", "y")
    assert found["value"] > 1000
    assert found["without"] < found["bound"] < found["value"]
    assert found["text"] == "loss = F.mse_loss(model(x), y)"
    assert found["how"] == "replayed"
    assert {name for name, _ in found["gradients"]} == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_loss_that_is_a_sum_over_the_samples_is_attributed_like_a_mean(watched):
    model = mlp()

    def step_of(step, optimizer):
        x, y = regression()
        if step == SPIKE:
            y[3] = y[11] = 500.0
        loss = (model(x) - y).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    (found,) = watched(model, step_of, lr=1e-3)
    assert sorted(found["samples"]) == [3, 11]
    assert sum(found["shares"]) == pytest.approx(1.0, abs=0.05)


def test_an_unusual_input_is_named_if_the_batch_is_the_second_dimension(watched):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, 8)
            self.out = nn.Linear(8, 1)

        def forward(self, x):
            return self.out(self.gru(x)[0][-1]).squeeze(1) + x.mean((0, 2))

    model = Net()

    def step_of(step, optimizer):
        x = torch.randn(5, 12, 3)
        y = x[-1, :, 0]
        if step == SPIKE:
            x[:, 7] *= 1e4
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    (found,) = watched(model, step_of)
    assert (found["samples"], found["blame"], found["batch_size"]) == ([7], "input", 12)


def test_a_batch_norm_keeps_its_batch_and_its_statistics(watched):
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def step_of(step, optimizer):
        x, y = regression()
        if step == SPIKE:
            y[9] = -700.0
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    (found,) = watched(model, step_of)
    assert found["samples"] == [9]


def test_a_label_that_is_only_wrong_is_blamed_on_the_target_by_exclusion(watched):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.copy_(40 * torch.eye(4)[:3])

    def step_of(step, optimizer):
        y = torch.randint(0, 3, (16,))
        x = F.one_hot(y, 4).float() + 0.05 * torch.randn(16, 4)
        if step == SPIKE:
            y[2] = (y[2] + 1) % 3
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    (found,) = watched(model, step_of, lr=1e-4)
    assert (found["samples"], found["blame"], found["odd"]) == ([2], "target", None)


def test_a_batch_that_is_unusual_as_a_whole_names_no_samples(watched):
    model = mlp()

    def step_of(step, optimizer):
        x, y = regression()
        if step == SPIKE:
            x, y = x * 80, -y * 80
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    found = watched(model, step_of)[0]
    assert (found["samples"], found["blame"]) == ([], "batch")
    assert found["inputs"][0]["high"] > 50


def test_a_gradient_spike_at_a_low_loss_names_sample_and_layer(watched):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Linear(6, 8)
            self.score = nn.Linear(8, 1)

        def forward(self, x):
            return self.score(torch.tanh(self.encoder(x))).squeeze(1)

    model = Net()

    def step_of(step, optimizer):
        x, _ = regression()
        gain = torch.rand(16)
        if step == SPIKE:
            gain[4] = 1e6 if model(x)[4] < 0 else -1e6  # the loss becomes very low
        loss = (gain * model(x)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    found = watched(model, step_of, lr=1e-4)[0]
    assert (found["what"], found["samples"], found["odd"]["name"]) == ("gradient", [4], "gain")
    assert found["layer"] in ("encoder", "score")
    assert found["without"] < found["bound"]
    assert found["gradients"][0][1] >= found["gradients"][-1][1]


def test_the_dataset_index_is_named(watched):
    torch.manual_seed(4)
    x, y = regression(480)
    y[77] = 800.0
    batches = [iter(DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)) for _ in range(3)]
    model = mlp()

    def step_of(step, optimizer):
        a, b = next(batches[step // 30])
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    found = watched(model, step_of, steps=89)
    assert [one["indices"] for one in found] == [[77]] * len(found)
    assert found


def test_contrastive_labels_are_positions_in_the_batch_and_shrink_with_it(watched):
    torch.manual_seed(2)
    left, right = nn.Linear(6, 8), nn.Linear(6, 8)
    model = nn.ModuleDict({"left": left, "right": right})

    def step_of(step, optimizer):
        x, _ = regression()
        a, b = left(x), right(x)
        scale = torch.ones(16, 1)
        if step == SPIKE:
            scale[6] = -4e3
        loss = F.cross_entropy((a * scale) @ b.T, torch.arange(16))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    found = watched(model, step_of, lr=1e-3)
    assert [one["samples"] for one in found[:1]] == [[6]]


def test_a_step_that_cannot_be_run_again_is_attributed_by_the_model_alone_with_the_reason(watched):
    model = mlp()
    stream = iter(range(10_000))

    def step_of(step, optimizer):
        x, y = regression()
        if step == SPIKE:
            x[3] *= 5e3
        loss = F.mse_loss(model(x), y) + 0 * next(stream)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    found = watched(model, step_of)[0]
    assert found["how"] == "model"
    assert "next()" in found["caveats"][0]
    assert (found["samples"], found["blame"]) == ([3], "input")


def test_a_replay_with_another_value_is_not_used(watched):
    model = mlp()
    state = {"weight": 1.0}

    def weight():
        return state["weight"]

    def step_of(step, optimizer):
        x, y = regression()
        state["weight"] = 1e4 if step == SPIKE else 1.0
        loss = F.mse_loss(model(x), y) * weight()
        state["weight"] = 1.0
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    found = watched(model, step_of, lr=1e-5)[0]
    assert found["samples"] is None
    assert "was run again and its loss was" in found["caveats"][0]


def test_a_step_with_activation_checkpointing_is_replayed(watched):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.out = nn.Linear(6, 16), nn.Linear(16, 1)

        def forward(self, x):
            return self.out(checkpoint(lambda x: torch.relu(self.body(x)), x, use_reentrant=False))

    model = Net()

    def step_of(step, optimizer):
        x, y = regression()
        if step == SPIKE:
            y[8] = 600.0
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    assert watched(model, step_of)[0]["samples"] == [8]


def test_a_micro_batch_of_an_accumulated_gradient_is_replayed_by_itself(watched):
    model = mlp()

    def step_of(step, optimizer):
        optimizer.zero_grad()
        for part in range(4):
            x, y = regression(8)
            if step == SPIKE and part == 2:
                y[1] = 900.0
            loss = F.mse_loss(model(x), y) / 4
            loss.backward()
        optimizer.step()

    found = watched(model, step_of)[0]
    assert (found["samples"], found["batch_size"], found["how"]) == ([1], 8, "replayed")


def test_the_second_of_two_losses_is_replayed_from_its_own_line(watched):
    model = nn.ModuleDict({"made": nn.Linear(6, 1), "judge": nn.Linear(6, 1)})

    def step_of(step, optimizer):
        x, y = regression()
        optimizer.zero_grad()
        first = F.mse_loss(model["made"](x), y)
        first.backward()
        z = y.clone()
        if step == SPIKE:
            z[9] = 900.0
        second = F.mse_loss(model["judge"](x), z)
        second.backward()
        optimizer.step()

    found = watched(model, step_of)[0]
    assert (found["where"], found["samples"], found["odd"]["name"]) == ("loss:2", [9], "z")
    assert found["text"] == 'second = F.mse_loss(model["judge"](x), z)'


def test_a_compiled_model_is_run_without_compiling(watched):
    model = mlp()
    compiled = torch.compile(model, backend="eager")

    def step_of(step, optimizer):
        x, y = regression()
        if step == SPIKE:
            y[5] = 900.0
        loss = F.mse_loss(compiled(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    found = watched(compiled, step_of)[0]
    assert (found["samples"], found["how"]) == ([5], "replayed")


def test_losses_inside_a_closure_are_not_replayed(watched):
    model = mlp()

    def step_of(step, optimizer):
        x, y = regression()

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) * (1e6 if step == SPIKE else 1)
            loss.backward()
            return loss

        optimizer.step(closure)

    assert watched(model, step_of, kind=torch.optim.SGD, lr=1e-9) == []


@pytest.mark.needs_bfloat16("linear")
def test_a_scaled_loss_is_attributed_without_its_scale(watched):
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=20)

    def step_of(step, optimizer):
        x, y = regression()
        if step == SPIKE:
            y[5] = 900.0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    found = watched(model, step_of)
    assert [one["samples"] for one in found] == [[5]]
    assert found[0]["value"] < 1e5
    assert found[0]["text"] == "loss = F.mse_loss(model(x).float(), y)"


class Traces(nn.Module):
    """A model with every kind of state that a replay could change."""

    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 1)
        self.calls = []

    def forward(self, x):
        h = self.drop(torch.relu(self.norm(self.first(x))))
        self.calls.append(len(x))
        return self.head(self.gru(h[:, None])[0][:, 0])


def outcome(model, optimizer):
    """Trains with a spike of the loss and one of the gradient; returns a hash of all results."""
    losses = []
    for step in range(SPIKE + 20):
        x, y = regression(12)
        gain = torch.ones(12, 1)
        if step == SPIKE:
            y[4] = 3e3
        if step == SPIKE + 17:
            gain[5] = 1e-9
            gain[5] += -1e7
        loss = F.mse_loss(model(x), y) + (gain - 1).mul(model.head.weight.sum()).mean() * 1e-3
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e6)
        optimizer.step()
        losses.append(loss.item())
    numbers = [tensor.detach().numpy().tobytes() for tensor in model.state_dict().values()]
    moments = [value.numpy().tobytes() for slot in optimizer.state.values() for value in slot.values() if isinstance(value, torch.Tensor)]
    parts = (numbers, moments, torch.get_rng_state().numpy().tobytes(), repr(losses), model.calls)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def test_training_with_replayed_spikes_is_bit_identical_to_unwatched_training(tmp_path):
    def trained(watched):
        torch.manual_seed(11)
        model = Traces()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if not watched:
            return outcome(model, optimizer)
        with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
            return outcome(model, optimizer)

    assert trained(True) == trained(False)
    assert {one["what"] for one in spikes(tmp_path / "run")} == {"loss", "gradient"}
    assert all(one["how"] == "replayed" for one in spikes(tmp_path / "run"))


def test_no_tensor_of_the_step_is_kept_alive(watched):
    model = mlp()
    references = []

    def step_of(step, optimizer):
        x, y = regression()
        if step == SPIKE:
            y[5] = 900.0
            references.append(weakref.ref(x))
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        del x, loss
        assert all(reference() is None for reference in references)

    assert len(watched(model, step_of)) == 1


# ---- magnitudes of samples


def test_magnitudes_are_the_mean_absolute_values_of_the_samples_along_either_dimension():
    x = torch.tensor([[1.0, -3.0], [0.0, 0.0], [4.0, 4.0]])
    assert sample_magnitudes("x", x, 3).values == (2.0, 0.0, 4.0)
    assert sample_magnitudes("x", x.T, 3).values == (2.0, 0.0, 4.0)
    assert sample_magnitudes("x", x, 5) is None
    assert sample_magnitudes("x", x.long(), 3) is None


def test_numbers_that_would_overflow_when_squared_have_a_magnitude():
    assert sample_magnitudes("x", torch.full((2, 4), 1e30), 2).values == pytest.approx((1e30, 1e30))
    assert sample_magnitudes("x", torch.full((2, 4), 6e4, dtype=torch.float16), 2).values == pytest.approx((6e4, 6e4), rel=1e-3)


def test_the_layer_at_which_a_sample_begins_to_deviate_is_named():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.where(x[:, :1] > 5, x * 1000, x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), Odd(), nn.ReLU())
    x = torch.rand(8, 4)
    x[3, 0] = 6.0
    with layer_magnitudes({"": model}, 8) as layers:
        model(x)
    assert [one.name for one in layers] == ["0", "1", "2"]
    found = find_deviating_layer(layers, (3,), 10.0)
    assert found.name == "1"
    assert found.size > 1000 * found.others
    assert not any(module._forward_hooks for module in model.modules())


def test_samples_that_are_like_the_others_deviate_at_no_layer():
    model = nn.Linear(4, 4)
    with layer_magnitudes({"net": model}, 6) as layers:
        model(torch.ones(6, 4))
    assert layers[0].name == "net"
    assert find_deviating_layer(layers, (2,), 4.0) is None


def test_a_sample_that_is_much_smaller_than_the_others_deviates_too():
    table = nn.Embedding(10, 4)
    with torch.no_grad():
        table.weight[7] *= 1e-7
    with layer_magnitudes({"": nn.Sequential(table)}, 5) as layers:
        table(torch.tensor([0, 1, 7, 3, 4]))
    found = find_deviating_layer(layers, (2,), 4.0)
    assert found.name == "0"
    assert found.size < 1e-5 * found.others


def test_a_spike_on_a_batch_that_is_always_the_same_is_blamed_on_the_update(watched):
    model = mlp()
    x, y = regression()

    def step_of(step, optimizer):
        optimizer.param_groups[0]["lr"] = 300.0 if step == SPIKE - 1 else 1e-3  # a leap of the optimizer: the next loss is far off
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    found = watched(model, step_of)[0]
    assert (found["blame"], found["samples"]) == ("update", None)
