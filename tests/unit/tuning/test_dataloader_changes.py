"""What a trial needs to know of a DataLoader: how much a batch holds, and how much lies ready."""

import time
import weakref

import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader  # noqa: E402

from sonde.tuning.apply_changes import num_prefetched, num_samples  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("batch", "num"),
    [
        (torch.zeros(8, 3), 8),
        ((torch.zeros(4, 3), torch.zeros(4)), 4),
        ({"ids": [torch.zeros(5, 2)], "name": ["a"]}, 5),
        (torch.tensor(3.0), 1),
        (["a", "b"], 1),
    ],
    ids=["tensor", "pair", "mapping", "scalar", "no tensor"],
)
def test_samples_are_counted_in_whatever_a_loader_yields(batch, num):
    assert num_samples(batch) == num


def test_batches_that_workers_have_made_ahead_are_counted():
    iterator = iter(DataLoader(list(range(100)), num_workers=2))
    for _ in range(400):  # they have two each ready, sooner or later
        if num_prefetched(weakref.ref(iterator)) == 4:
            break
        time.sleep(0.05)
    assert num_prefetched(weakref.ref(iterator)) == 4
    iterator._shutdown_workers()


def test_without_workers_nothing_lies_ready():
    iterator = iter(DataLoader(list(range(100))))
    assert num_prefetched(weakref.ref(iterator)) == 0
    assert num_prefetched(None) == 0
