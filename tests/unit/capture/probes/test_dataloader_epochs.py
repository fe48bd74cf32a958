"""What a run records of passes over the data."""

from __future__ import annotations

import argparse
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import sonde

pytestmark = pytest.mark.torch


def parts():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(model, optimizer, x=None):
    optimizer.zero_grad()
    model(torch.randn(4, 3) if x is None else x).square().mean().backward()
    optimizer.step()


def events(session, kind):
    session.close()
    return [event.data for event in sonde.Run(session.run).events(kind)]


def loader(num=8, size=2):
    return DataLoader(TensorDataset(torch.randn(num, 3)), batch_size=size)


def one_pass(model, optimizer, data):
    for (x,) in data:
        update(model, optimizer, x)


def test_passes_know_the_loop_of_epochs_around_them_and_where_it_may_be_left(tmp_path):
    model, optimizer = parts()
    data, args = loader(), argparse.Namespace(epochs=5)
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        for epoch in range(1, args.epochs + 1):
            one_pass(model, optimizer, data)
            if epoch == 3:
                break
    found = events(session, "pass")
    assert [(one["num"], one["at"], one["planned"], one["num_batches"]) for one in found] == [(1, 0, 5, 4), (2, 1, 5, 4), (3, 2, 5, 4)]
    assert [event.step for event in sonde.Run(session.run).events("pass")] == [0, 4, 8]
    assert len(found[0]["breaks"]) == 1
    assert dict(session.report().run.summary)["stopped"].startswith("in round 3 of 5 of the loop at test_dataloader_epochs.py:")


def rounds_in(tmp_path, run):
    model, optimizer = parts()
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        run(model, optimizer, loader())
    return [one.get("planned") for one in events(session, "pass")]


def test_a_loop_that_is_not_plain_is_not_read(tmp_path):
    def counting(model, optimizer, data):
        epoch = 0
        while epoch < 2:
            one_pass(model, optimizer, data)
            epoch += 1

    assert rounds_in(tmp_path, counting) == [None, None]


def test_the_loop_is_found_behind_a_progress_bar_around_the_loader(tmp_path):
    bars = {}  # as tqdm does it, from where it is installed
    exec(compile("def bar(data):\n    yield from data\n", "/lib/site-packages/tqdm/std.py", "exec"), bars)

    def with_bar(model, optimizer, data):
        for _epoch in range(3):
            for (x,) in bars["bar"](data):
                update(model, optimizer, x)

    assert rounds_in(tmp_path, with_bar) == [3, 3, 3]


def test_the_loop_is_found_behind_a_loop_over_a_few_names(tmp_path):
    def phases(model, optimizer, data):
        for _epoch in range(2):
            for _phase in ["train", "val"]:
                for (x,) in data:
                    update(model, optimizer, x)

    assert rounds_in(tmp_path, phases) == [2, 2, 2, 2]


def test_reading_the_loop_keeps_nothing_of_the_users_alive(tmp_path):
    model, optimizer = parts()
    data = loader()

    def train():
        big = torch.zeros(1000)
        alive = weakref.ref(big)
        for _epoch in range(2):
            one_pass(model, optimizer, data)
            big = None
            gc.collect()
            assert alive() is None
        return big

    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        train()
    assert len(events(session, "pass")) == 2


def test_a_loader_that_is_started_for_single_batches_is_recorded_a_few_times_only(tmp_path):
    model, optimizer = parts()
    data = loader()
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        for _ in range(40):
            update(model, optimizer, next(iter(data))[0])
    passes = events(session, "pass")
    assert len(passes) == 16
    assert passes[-1]["last_told"]
    assert "stopped" not in dict(session.report().run.summary)


def test_a_loop_around_the_session_is_not_a_loop_inside_of_it(tmp_path):
    model, optimizer = parts()
    data = loader()
    for epoch in range(3):
        with sonde.watch(model, optimizer, to=tmp_path / f"run{epoch}", strict=True) as session:
            one_pass(model, optimizer, data)
        assert "planned" not in events(session, "pass")[0]


class Endless(IterableDataset):
    def __iter__(self):
        return iter(torch.randn(6, 3))

    def __len__(self):
        return 2


def test_a_loader_over_an_iterable_is_not_asked_for_its_length(tmp_path):
    # It would warn, since there is more than its length.
    model, optimizer = parts()
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        for x in DataLoader(Endless(), batch_size=2):
            update(model, optimizer, x)
    assert events(session, "pass")[0]["num_batches"] is None
