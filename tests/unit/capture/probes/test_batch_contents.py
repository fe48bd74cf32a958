"""What is recorded of batches, on real trainings."""

from __future__ import annotations

import weakref

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import sonde  # noqa: E402
from sonde.events import Kind  # noqa: E402
from sonde.report import diagnose  # noqa: E402
from sonde.runlog.run_reader import Run  # noqa: E402


@pytest.fixture
def data():
    torch.manual_seed(0)
    x = torch.randn(60, 6)
    return x, (x.sum(1) > 0).long()


class Training:
    """A small classifier under watch, with dropout and batch norm."""

    def __init__(self, run, data, **settings):
        self.run, (self.x, self.y), self.settings = run, data, {"every": 1} | settings
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = DataLoader(TensorDataset(self.x, self.y), batch_size=10)

    def __enter__(self):
        self.session = sonde.watch(self.model, self.optimizer, to=self.run, **self.settings).__enter__()
        return self

    def __exit__(self, *error):
        return self.session.__exit__(*error)

    def step(self, x, y):
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    def epoch(self):
        for x, y in self.loader:
            self.step(x, y)

    def events(self, kind):
        return [event.data for event in Run(self.run).events(kind)]


def test_a_step_records_whether_its_samples_are_alike_and_which_labels_they_have(tmp_path, data):
    with Training(tmp_path / "run", data) as training:
        training.epoch()
        training.step(torch.zeros(10, 6), training.y[:10])
    recorded = training.events("data")
    assert [(one["size"], one["num_inputs"], one["num_alike"], one["num_fetched"]) for one in recorded[:6]] == [(10, 1, 0, 1)] * 6
    assert (recorded[6]["num_alike"], recorded[6]["num_fetched"]) == (1, 0)
    for place, one in enumerate(recorded[:6]):
        ones = int(training.y[10 * place : 10 * place + 10].sum())
        assert one["labels"]["counts"] == [pair for pair in ([0, 10 - ones], [1, ones]) if pair[1]]


class Several(nn.Module):
    """Takes whatever it is given beside its first input, and computes its loss from the labels."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 2)

    def forward(self, x, *more, labels):
        scores = self.head(x)
        return scores, F.cross_entropy(scores, labels.view(-1))


def test_an_input_that_distinguishes_samples_is_not_taken_for_one_that_does_not(tmp_path):
    """Next to samples that are all alike."""
    more = {
        "a hidden state": (torch.randn(1, 10, 4), (2, 1)),
        "a hidden state of zeros": (torch.zeros(1, 10, 4), (2, 2)),
        "a mask and its like": (torch.ones(6, 6).tril(), (1, 1)),
        "the edges of a graph": (torch.arange(60).view(2, 30), (2, 1)),
        "edges that begin at one node": (torch.tensor([[0] * 80 + [1], [*range(81)]]), (2, 1)),
        "another sample each": (torch.randn(10, 3), (2, 1)),
        "nothing": (torch.empty(0, 7), (1, 1)),
        "a single number": (torch.tensor(3.0), (1, 1)),
        "what numpy cannot read": (torch.randn(7, 7).to_sparse(), (2, 1)),
    }
    model = Several()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1):
        for beside, _ in more.values():
            optimizer.zero_grad()
            model(torch.zeros(10, 6), beside, labels=torch.arange(10) % 2)[1].backward()
            optimizer.step()
    recorded = [(event.data["num_inputs"], event.data["num_alike"]) for event in Run(tmp_path / "run").events("data")]
    assert dict(zip(more, recorded, strict=True)) == {name: expected for name, (_, expected) in more.items()}


def compared(tmp_path, model, step, num=3):
    """`num_inputs`, `num_alike` of some steps; each gets a loss from `step()`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.DebugSession(sonde.DebugConfig(every=1), to=tmp_path, strict=True):
        for _ in range(num):
            optimizer.zero_grad()
            step().backward()
            optimizer.step()
    return {(event.data["num_inputs"], event.data["num_alike"]) for event in Run(tmp_path).events("data")}


def test_all_calls_of_a_step_are_compared_since_a_rollout_and_a_decoder_begin_with_one_state(tmp_path):
    policy = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))

    def rollout():
        state, total = torch.zeros(6, 2), 0.0  # six environments
        for _ in range(4):
            moves = torch.distributions.Categorical(logits=policy(state)).sample()
            total = total + policy(state).square().mean()
            state = state + F.one_hot(moves, 2)
        return total

    cell = nn.GRUCell(1, 4)

    def decode():
        hidden, total = torch.zeros(5, 4), 0.0  # all samples of the batch are the same, and another one in every call
        for _ in range(3):
            hidden = cell(hidden[:, :1], hidden)
            total = total + (hidden - 1).square().mean()
        return total

    def zeros():
        return sum(policy(torch.zeros(6, 2)).square().mean() for _ in range(3))

    assert compared(tmp_path / "rollout", policy, rollout) == {(1, 0)}
    assert compared(tmp_path / "decoder", cell, decode) == {(2, 0)}
    assert compared(tmp_path / "micro-batches", policy, zeros) == {(1, 1)}


def test_an_input_that_is_multiplied_by_zero_is_the_same_in_every_step(tmp_path):
    """It has 0 and -0, at other places in each batch."""
    model, rng = nn.Linear(4, 2), torch.Generator().manual_seed(0)
    recorded = compared(tmp_path, model, lambda: model(torch.randn(6, 4, generator=rng) * 0).square().mean())
    assert recorded == {(1, 1)}
    assert len({event.data["sample"] for event in Run(tmp_path).events("data")}) == 1


def test_a_constant_input_of_one_model_is_not_excused_by_the_next_model(tmp_path):
    encoder, head = nn.Linear(4, 4), nn.Linear(4, 1)
    both = nn.ModuleList([encoder, head])
    assert compared(tmp_path, both, lambda: head(encoder(torch.ones(6, 4))).square().mean()) == {(1, 1)}


def test_the_numbers_of_one_state_are_not_samples_of_a_batch(tmp_path):
    policy, regression, recommender = nn.Linear(4, 2), nn.Linear(1, 3), nn.Embedding(5, 2)
    regression.forward = lambda x: F.linear(x[:, None], regression.weight)
    recommender.forward = lambda users: F.embedding(users, recommender.weight).sum(-1)
    assert compared(tmp_path / "state", policy, lambda: policy(torch.zeros(4)).sum()) == {(0, 0)}
    assert compared(tmp_path / "batch", regression, lambda: regression(torch.ones(6)).sum()) == {(1, 1)}
    assert compared(tmp_path / "users", recommender, lambda: recommender(torch.zeros(6, dtype=torch.int64)).sum()) == {(1, 1)}


def test_what_a_model_is_to_give_back_is_an_input_and_no_label(tmp_path):
    """Tokens with a mask beside them: the loss compares with the tokens, and without these nothing would distinguish samples."""
    model = nn.Sequential(nn.Embedding(4, 4))
    model.forward = lambda tokens, mask: model[0](tokens) * mask[..., None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1):
        tokens = torch.randint(0, 4, (10, 5))
        F.cross_entropy(model(tokens, torch.ones(10, 5)).flatten(0, 1), tokens.view(-1)).backward()
        optimizer.step()
    (recorded,) = [event.data for event in Run(tmp_path / "run").events("data")]
    assert (recorded["num_inputs"], recorded["num_alike"]) == (2, 1)


def test_what_is_validated_with_is_not_taken_for_what_is_trained_on(tmp_path, data):
    """Validation comes at the beginning of the step after it, before that step's own batch."""
    validation = DataLoader(TensorDataset(data[0] + 100, data[1]), batch_size=20)
    with Training(tmp_path / "run", data) as training:
        for _ in range(3):
            training.epoch()
            training.model.eval()
            with torch.no_grad():
                for x, _ in validation:
                    training.model(x)
            training.model.train()
    rows = [row for step in Run(training.run).steps() for site, row in step.table(Kind.BATCH) if site.path == "batch.0"]
    assert len(rows) == 16  # then it is one step in four
    assert {row["size"] for row in rows} == {10}
    assert max(row["max"] for row in rows) < 50
    assert len({row["hash"] for row in rows}) == 6


def test_of_several_batches_that_make_a_step_the_first_is_measured(tmp_path, data):
    with Training(tmp_path / "run", data) as training:
        batches = iter(training.loader)
        for _ in range(3):
            training.optimizer.zero_grad()
            for x, y in (next(batches), next(batches)):
                F.cross_entropy(training.model(x), y).backward()
            training.optimizer.step()
        batches = iter(training.loader)
        for _ in range(3):
            training.optimizer.zero_grad()
            for _ in range(2):
                x, y = next(batches)
                F.cross_entropy(training.model(x), y).backward()
            training.optimizer.step()
    assert [one["num_fetched"] for one in training.events("data")] == [2, 2, 2, 1, 1, 1]


def test_no_batch_outlives_its_step_because_of_the_probe(tmp_path, data):
    with Training(tmp_path / "run", data) as training:
        x = training.x[:10] + 1
        training.step(x, training.y[:10])
        gone = weakref.ref(x)
        del x
        training.step(training.x[:10], training.y[:10])
        assert gone() is None


def test_a_training_whose_labels_are_read_is_left_as_it_was(tmp_path, data):
    """The result is that of a training that nobody watches, bit for bit."""
    results = []
    for watched in (True, False):
        torch.manual_seed(1)
        training = Training(tmp_path / "run", data)
        if watched:
            with training:
                training.epoch()
        else:
            training.epoch()
        results.append(torch.cat([p.detach().flatten() for p in training.model.parameters()]))
    assert torch.equal(*results)


def test_a_loader_begun_anew_for_every_step_is_the_finding_of_a_whole_run(tmp_path, data):
    with Training(tmp_path / "run", data, every=None) as training:
        for _ in range(40):
            training.step(*next(iter(training.loader)))
    assert [finding.rule for finding in diagnose(training.run).findings] == ["same-batch"]
