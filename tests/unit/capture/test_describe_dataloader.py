"""The description of a DataLoader; the code of datasets is read, never run."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

import torch  # noqa: E402
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, WeightedRandomSampler  # noqa: E402

from sonde.capture.describe_dataloader import describe_loader  # noqa: E402


class Eight(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        raise AssertionError("it is never asked for a sample")


class Drawing(Eight):
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __getitem__(self, i):
        return self.noisy(i)

    def noisy(self, i):
        return i + self.rng.normal()


class DrawnOnce(Eight):
    """The generator makes the data, before any worker starts."""

    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.x = self.rng.normal(size=8)

    def __getitem__(self, i):
        return self.x[i]


class Seeded(Drawing):
    def noisy(self, i):
        worker = torch.utils.data.get_worker_info()
        self.rng = np.random.default_rng(worker.seed if worker else 0)
        return i + self.rng.normal()


class SeededBySample(Drawing):
    def noisy(self, i):
        self.rng = np.random.default_rng(i)
        return i + self.rng.normal()


class Flip:
    def __init__(self):
        self.coin = random.Random(0)

    def __call__(self, x):
        return -x if self.coin.random() > 0.5 else x


class Transformed(Eight):
    def __init__(self):
        self.transforms = [Flip()]

    def __getitem__(self, i):
        for transform in self.transforms:
            i = transform(i)
        return i


class Shaken(Eight):
    def __getitem__(self, i):
        return shaken(i)


def shaken(i):
    return i + np.random.rand()


RNG = np.random.default_rng(0)
GLOBAL = np.random.mtrand._rand


class DrawnOutside(Eight):
    def __getitem__(self, i):
        return drawn_outside(i)


def drawn_outside(i):
    return i + RNG.normal()


class NamedAlike(Eight):
    """Its attribute has the name of a generator of the module."""

    RNG = 3

    def __getitem__(self, i):
        return i + self.RNG


class TakesTheGlobal(Eight):
    def __getitem__(self, i):
        return i + GLOBAL.rand()


class With(Eight):
    def __init__(self, transform):
        self.transform = transform

    def __getitem__(self, i):
        return self.transform(i)


def shifted(shift, i):
    return shift + i + RNG.normal()


def made_with_a_generator():
    own = random.Random(0)
    return lambda i: i + own.random()


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(8)


class Divided(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        yield from range(info.id, 8, info.num_workers)


def seeds_all_alike(worker_id):
    np.random.seed(42)


def seeds_each(worker_id):
    np.random.seed(worker_id)


def seeds_from_torch(worker_id):
    np.random.seed(torch.initial_seed() % 2**32)


@pytest.mark.parametrize(
    ("dataset", "copied"),
    [
        (Drawing(), ["rng"]),
        (Transformed(), ["transforms.0.coin"]),
        (Subset(Drawing(), [0, 1]), ["dataset.rng"]),
        (DrawnOnce(), []),
        (Seeded(), []),
        (SeededBySample(), []),
        (Shaken(), []),
    ],
    ids=["its_own", "of_a_transform", "of_a_subset", "drawn_once", "seeded_by_worker", "seeded_by_sample", "global"],
)
def test_generators_that_workers_draw_from_are_found(dataset, copied):
    assert describe_loader(DataLoader(dataset, num_workers=2))["copied_generators"] == copied


@pytest.mark.parametrize(
    ("dataset", "names"),
    [
        (DrawnOutside(), ["RNG"]),
        (With(drawn_outside), ["RNG"]),
        (With(partial(shifted, 3)), ["RNG"]),
        (With(made_with_a_generator()), ["own"]),
        (NamedAlike(), []),
        (TakesTheGlobal(), []),
        (With(abs), []),
    ],
    ids=["by_a_function", "by_a_transform", "by_a_partial", "by_a_closure", "an_attribute", "the_global_one", "builtin"],
)
def test_generators_of_a_module_that_workers_draw_from_are_found(dataset, names):
    assert describe_loader(DataLoader(dataset, num_workers=2))["copied_globals"] == names


def test_a_collate_fn_runs_in_the_workers_too():
    assert describe_loader(DataLoader(Eight(), num_workers=2, collate_fn=drawn_outside))["copied_globals"] == ["RNG"]
    assert describe_loader(DataLoader(Eight(), num_workers=2))["copied_globals"] == []


def takes_hold(worker_id):
    torch.utils.data.get_worker_info().dataset.rng = np.random.default_rng(worker_id)


def makes_another(worker_id):
    global RNG
    RNG = np.random.default_rng(worker_id)


def test_a_worker_init_fn_that_seeds_the_global_generators_leaves_others_alike():
    datasets = (Drawing(), DrawnOutside(), Stream())
    seeded = [describe_loader(DataLoader(dataset, num_workers=2, worker_init_fn=seeds_from_torch)) for dataset in datasets]
    assert [(each["copied_generators"], each["copied_globals"], each["is_worker_aware"]) for each in seeded] == [
        (["rng"], [], False), ([], ["RNG"], False), ([], [], False),
    ]  # fmt: skip
    assert describe_loader(DataLoader(Drawing(), num_workers=2, worker_init_fn=takes_hold))["copied_generators"] == []
    assert describe_loader(DataLoader(DrawnOutside(), num_workers=2, worker_init_fn=makes_another))["copied_globals"] == []
    assert describe_loader(DataLoader(Stream(), num_workers=2, worker_init_fn=takes_hold))["is_worker_aware"]


@pytest.mark.parametrize(
    ("dataset", "init", "alike"),
    [
        (Shaken(), seeds_all_alike, ["numpy"]),
        (Shaken(), seeds_each, []),
        (Shaken(), seeds_from_torch, []),
        (DrawnOnce(), seeds_all_alike, []),
        (Transformed(), lambda _: random.seed(1), ["random"]),
        (Shaken(), lambda _: torch.manual_seed(1), []),
    ],
    ids=["alike", "each", "from_torch", "nothing_is_drawn", "random", "another_library"],
)
def test_workers_that_are_seeded_alike_are_found_where_they_draw(dataset, init, alike):
    assert describe_loader(DataLoader(dataset, num_workers=2, worker_init_fn=init))["seeded_alike"] == alike


def test_one_worker_has_nobody_to_draw_the_same():
    assert "copied_generators" not in describe_loader(DataLoader(Drawing(), num_workers=1))
    assert "copied_generators" not in describe_loader(DataLoader(Drawing()))


def test_an_iterable_dataset_is_asked_whether_it_knows_its_worker():
    facts = describe_loader(DataLoader(Stream(), num_workers=2))
    assert (facts["order"], facts["is_worker_aware"], "num_batches" in facts) == ("stream", False, False)
    assert describe_loader(DataLoader(Divided(), num_workers=2))["is_worker_aware"]


def test_the_order_and_the_number_of_batches_are_described():
    data = TensorDataset(torch.zeros(10, 2))
    facts = [describe_loader(loader) for loader in (DataLoader(data, 4), DataLoader(data, 4, shuffle=True, drop_last=True))]
    assert [(each["order"], each["num_batches"], each["batch_size"]) for each in facts] == [("sequential", 3, 4), ("random", 2, 4)]
    assert describe_loader(DataLoader(data, sampler=WeightedRandomSampler([1.0] * 10, 10)))["order"] == "other"


def test_a_loader_that_raises_when_it_is_read_has_no_description():
    class Rude:
        num_workers = "many"

        @property
        def dataset(self):
            raise RuntimeError("not now")

    assert describe_loader(Rude()) == {}
