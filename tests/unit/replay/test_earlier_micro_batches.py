"""The micro-batch that makes an accumulated gradient non-finite is found."""

import hashlib

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import sonde  # noqa: E402
from sonde import DebugConfig, Origin, Run  # noqa: E402
from sonde.replay.capsule.create_capsule import load_capsule  # noqa: E402
from sonde.replay.capsule.replay_capsule_with_model import replay  # noqa: E402

ITEM = 37  # index in the dataset: its norm is zero, and the derivative of sqrt at zero is infinite


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        length = (x * self.scale).square().sum(1).sqrt()
        return self.head(self.drop(x)).squeeze(1) * length


def train(seed, *, flat=False, watched=None, clip=False):
    """Trains eight micro-batches, four per update. Returns (micro-batch, position) of the bad item, and a hash of all results."""
    torch.manual_seed(seed)
    inputs = torch.rand(64, 6) + 0.5
    inputs[ITEM] = 0.0
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1)), 8, shuffle=True)
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    position, losses = None, []
    session = watched(model, optimizer) if watched else None
    for index, (x, y) in enumerate(loader):
        bad = (x == 0).all(1)
        if bad.any():
            position = index % 4, int(bad.nonzero())
        out = model(x[:, None].squeeze(1) if flat else x)
        loss = (out - y).square().mean() / 4
        loss.backward()
        losses.append(loss.item())
        if index % 4 == 3:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    if session:
        session.close()
    numbers = [tensor.detach().numpy().tobytes() for tensor in (*model.state_dict().values(), torch.get_rng_state())]
    return position, hashlib.sha256(repr((numbers, losses)).encode()).hexdigest()


def watched_in(run, **settings):
    return lambda model, optimizer: sonde.watch(model, optimizer, to=run, config=DebugConfig(**settings), strict=True)


def origin(run):
    (event,) = Run(run).events("origin")
    return Origin.from_dict(event.data)


@pytest.fixture(scope="module")
def seeds():
    """A seed for each micro-batch of an update that may hold the bad item."""
    found = {}
    for seed in range(40):
        (batch, _), _ = train(seed)
        found.setdefault(batch, seed)
    return found


@pytest.mark.parametrize("batch", [0, 1, 2, 3])
@pytest.mark.parametrize("flat", [False, True], ids=["x", "a view of x"])
def test_the_micro_batch_and_its_sample_are_named(batch, flat, seeds, tmp_path):
    (_, sample), _ = train(seeds[batch], flat=flat, watched=watched_in(tmp_path / "run"))
    found = origin(tmp_path / "run")
    assert (found.operation, found.phase, found.samples, found.indices) == ("sqrt", "backward", (sample,), (ITEM,))
    notes = [note for note in found.caveats if "micro-batch" in note]
    assert len(notes) == (batch < 3)
    assert all(f"micro-batch {batch + 1} of the last 4" in note for note in notes)


def test_the_origin_is_found_if_the_gradients_are_clipped_before_the_update(seeds, tmp_path):
    train(seeds[1], clip=True, watched=watched_in(tmp_path / "run"))
    assert origin(tmp_path / "run").operation == "sqrt"


def test_the_training_is_bit_identical(seeds, tmp_path):
    assert train(seeds[0], watched=watched_in(tmp_path / "run")) == train(seeds[0])


def test_the_capsule_holds_the_micro_batch_that_was_found(seeds, tmp_path):
    (_, sample), _ = train(seeds[2], watched=watched_in(tmp_path / "run", save_debug_info=True))
    (event,) = Run(tmp_path / "run").events("origin")
    capsule = load_capsule(tmp_path / "run" / event.data["capsule"])
    assert (capsule.args[0][sample] == 0).all()
    assert replay(capsule, Scaled()).operation == "sqrt"


def test_a_micro_batch_of_another_size_cannot_be_replayed_and_the_reason_is_recorded(tmp_path):
    torch.manual_seed(0)
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    bad, good = torch.zeros(5, 6), torch.rand(8, 6) + 0.5
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
        for x in (bad, good):
            y = x.sum(1)
            loss = (model(x) - y).square().mean()
            loss.backward()
        optimizer.step()
    (event,) = Run(tmp_path / "run").events("origin_unknown")
    assert "in an earlier one of this step" in event.data["reason"]
