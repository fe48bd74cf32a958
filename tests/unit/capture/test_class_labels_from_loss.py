"""Labels as the loss was given them, out of its graph."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from sonde.capture import class_labels_from_loss  # noqa: E402
from sonde.statistics import batched_device_reads  # noqa: E402

SORTED = torch.tensor([0, 0, 1, 2])
MIXED = torch.tensor([2, 0, 1, 2])


def scores(*shape):
    return torch.zeros(*shape, requires_grad=True)


def counted(loss, *outputs, fetched=()):
    found = class_labels_from_loss.find_labels(loss, [tuple(output.shape) for output in outputs], fetched)
    return class_labels_from_loss.count_labels(found)


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: F.cross_entropy(out, MIXED),
        lambda out: F.cross_entropy(out, MIXED, label_smoothing=0.1, weight=torch.ones(3)),
        lambda out: F.nll_loss(F.log_softmax(out, 1), MIXED) * 1024 / 4,
        lambda out: out.square().sum() + 0.3 * F.cross_entropy(out, MIXED, reduction="sum"),
    ],
    ids=["cross_entropy", "smoothed", "nll_scaled", "regularised"],
)
def test_labels_of_a_classifier_are_counted_whatever_is_around_its_loss(loss):
    out = scores(4, 3)
    assert counted(loss(out), out) == {
        "num": 4, "num_classes": 3, "num_distinct": 3, "is_learnt": False, "counts": [[0, 1], [1, 1], [2, 2]], "in_order": False,
    }  # fmt: skip


def test_labels_in_order_are_distinguished_from_mixed_ones():
    out = scores(4, 3)
    assert counted(F.cross_entropy(out, SORTED), out)["in_order"]
    assert counted(F.cross_entropy(out, SORTED.flip(0)), out)["in_order"]
    assert not counted(F.cross_entropy(out, MIXED), out)["in_order"]


def test_ignored_labels_are_not_counted():
    out = scores(4, 3)
    assert counted(F.cross_entropy(out, torch.tensor([-100, 1, 1, -100])), out)["counts"] == [[1, 2]]


def test_a_single_label_is_not_counted():
    out = scores(4, 3)
    assert counted(F.cross_entropy(out, torch.tensor([-100, 1, -100, -100])), out) is None


def test_labels_of_every_pixel_and_every_token_are_counted():
    pixels, tokens = scores(2, 3, 4, 4), scores(2, 5, 3)
    assert counted(F.cross_entropy(pixels, torch.ones(2, 4, 4, dtype=torch.long)), pixels)["counts"] == [[1, 32]]
    assert counted(F.cross_entropy(tokens.flatten(0, 1), torch.ones(10, dtype=torch.long)), tokens)["counts"] == [[1, 10]]


def test_binary_labels_are_counted_where_there_is_one_for_each_sample():
    out = scores(4, 1)
    yes = torch.tensor([[1.0], [0.0], [1.0], [1.0]])
    assert counted(F.binary_cross_entropy_with_logits(out, yes), out)["counts"] == [[0, 1], [1, 3]]
    assert counted(F.binary_cross_entropy(out.sigmoid(), yes), out)["num_classes"] == 2
    assert counted(F.binary_cross_entropy_with_logits(out, 0.9 * yes), out) is None
    many = scores(4, 3)
    assert counted(F.binary_cross_entropy_with_logits(many, torch.ones(4, 3)), many) is None


def test_the_columns_of_a_contrastive_loss_are_no_classes():
    """The right answer is always column 0, on purpose: what the model puts out are features."""
    features = scores(4, 16)
    logits = torch.cat([features[:, :1], features @ torch.ones(16, 64)], dim=1)
    assert counted(F.cross_entropy(logits, torch.zeros(4, dtype=torch.long)), features) is None


def linear(x):
    return torch.nn.Linear(x.shape[-1], 3)(x)


def cast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return linear(x).float()


def frozen(x):
    """What is trained is before it."""
    return torch.nn.Linear(8, 3).requires_grad_(False)(torch.nn.Linear(8, 8)(x).relu())


def between_samples(x):
    """A positive in the first column, negatives behind it, as the model itself puts them out."""
    return torch.cat([(x * x.detach()).sum(1, keepdim=True), x @ torch.ones(8, 2)], dim=1)


def at_a_temperature(x):
    return between_samples(x) * torch.nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("head", "is_learnt"),
    [
        (linear, True),
        (lambda x: linear(x.expand(1, -1, -1)).squeeze(0) / 0.7, True),
        (lambda x: torch.nn.Conv1d(1, 3, 8)(x[:, None]).squeeze(2), True),
        (lambda x: x @ torch.nn.Parameter(torch.ones(8, 3)), True),
        pytest.param(cast, True, marks=pytest.mark.needs_bfloat16("linear")),
        (frozen, False),
        (between_samples, False),
        (at_a_temperature, False),
    ],
    ids=["linear", "viewed", "convolution", "product", "autocast", "frozen", "between_samples", "at_a_temperature"],
)
def test_columns_made_by_trained_weights_are_distinguished_from_others(head, is_learnt):
    out = head(scores(4, 8) * 2)
    assert counted(F.cross_entropy(out, MIXED), out)["is_learnt"] is is_learnt


def test_one_column_of_weights_is_learnt_too():
    out = torch.nn.Linear(8, 1)(scores(4, 8) * 2)
    assert counted(F.binary_cross_entropy_with_logits(out, torch.ones(4, 1)), out)["is_learnt"]
    assert counted(F.binary_cross_entropy(out.sigmoid().squeeze(1), torch.ones(4)), out)["is_learnt"]


def test_real_and_fake_are_counted_together():
    """Each loss of a discriminator has one label; both together have two."""
    out = scores(4, 1)
    loss = F.binary_cross_entropy_with_logits(out, torch.ones(4, 1)) + F.binary_cross_entropy_with_logits(out, torch.zeros(4, 1))
    found = counted(loss, out)
    assert (found["num"], found["num_classes"], found["counts"], found["in_order"]) == (8, 2, [[0, 4], [1, 4]], False)


def test_what_the_user_packed_is_not_unpacked():
    unpacked = []
    out = scores(4, 3)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: (unpacked.append(1), tensor)[1]):
        loss = F.cross_entropy(out, MIXED)
    assert counted(loss, out) is None
    assert not unpacked


def test_a_loss_inside_of_a_checkpoint_is_not_computed_again():
    runs = []

    def loss_of(out):
        runs.append(1)
        return F.cross_entropy(out, MIXED)

    out = scores(4, 3)
    loss = checkpoint(loss_of, out, use_reentrant=False)
    assert counted(loss, out) is None
    assert len(runs) == 1
    loss.backward()
    assert len(runs) == 2


def test_other_losses_and_what_is_no_loss_have_no_labels():
    out = scores(4, 3)
    assert counted((out - 1).square().mean(), out) is None
    assert counted(None) is None
    assert counted([out.sum()], out) is None
    assert counted(torch.tensor(1.0), out) is None


def test_labels_on_a_device_are_those_of_the_batch_that_was_handed_out(monkeypatch):
    out = scores(4, 3)
    loss = F.cross_entropy(out, SORTED)
    target = class_labels_from_loss._saved(loss.grad_fn, "target")
    monkeypatch.setattr(class_labels_from_loss, "on_device", lambda tensor: tensor.data_ptr() == target.data_ptr())
    assert not batched_device_reads.TREAT_CPU_AS_DEVICE
    assert counted(loss, out) is None
    assert counted(loss, out, fetched=[torch.ones(4, 2), MIXED])["counts"] == [[0, 1], [1, 1], [2, 2]]
    assert counted(loss, out, fetched=[MIXED, MIXED.clone()]) is None


def test_of_many_different_labels_the_most_frequent_are_reported():
    out = scores(200, 300)
    found = counted(F.cross_entropy(out, torch.arange(200)), out)
    assert (found["num"], found["num_distinct"], len(found["counts"])) == (200, 200, class_labels_from_loss.MAX_REPORTED)
