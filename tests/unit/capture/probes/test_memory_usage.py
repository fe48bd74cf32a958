"""The memory of a watched training: a cheap series, and an investigation where it grows."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import sonde
from sonde.capture import process_memory
from sonde.runlog.run_reader import Run

pytestmark = pytest.mark.torch


def train(to, num_steps, keep, *, every=1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = []
    with sonde.watch(model, optimizer, to=to, every=every, strict=True):
        for _ in range(num_steps):
            output = model(torch.randn(8, 16))
            loss = output.pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            keep(kept, output)


def test_memory_is_written_now_and_then_and_at_observed_steps(tmp_path):
    train(tmp_path / "run", 40, lambda kept, output: None, every=10)
    steps, values = Run(tmp_path / "run").scalar("rss_mb")
    known = steps[np.isfinite(values)].tolist()
    assert known == [0, 8, 10, 16, 20, 24, 30, 32]
    assert values[np.isfinite(values)].min() > 20
    limit = next(iter(Run(tmp_path / "run").events("memory_limit")))
    assert limit.data["num_bytes"] == process_memory.limit().num_bytes


def test_graphs_that_stay_alive_are_counted_and_their_holder_is_named(tmp_path):
    train(tmp_path / "run", 70, lambda kept, output: kept.append(output))
    run = Run(tmp_path / "run")
    assert run.scalar("kept_graphs")[1].max() >= 8
    found = next(iter(run.events("leaks"))).data["leaks"]
    assert "local 'kept'" in found[0]["holder"]
    assert found[0]["num_nodes"] > 0
    finding = sonde.diagnose(run).findings[0]
    assert finding.rule == "graph-leak"
    assert "train() local 'kept'" in finding.cause


def test_a_healthy_training_keeps_no_graph_alive_and_is_not_investigated(tmp_path):
    train(tmp_path / "run", 70, lambda kept, output: kept.append(output.detach()))
    run = Run(tmp_path / "run")
    assert run.scalar("kept_graphs")[1].max() <= 1
    assert not list(run.events("leaks"))
    assert "graph-leak" in sonde.diagnose(run).clear


def test_a_session_that_ends_during_a_leak_investigation_leaves_no_hook(tmp_path):
    before = dict(torch_optimizer._global_optimizer_post_hooks)
    train(tmp_path / "run", 46, lambda kept, output: kept.append(output))  # it began at step 41 and takes 14
    assert torch_optimizer._global_optimizer_post_hooks == before
    assert not list(Run(tmp_path / "run").events("leaks"))


def test_the_process_knows_its_memory():
    resident, most = process_memory.rss(), process_memory.peak_rss()
    assert 10 << 20 < resident <= most * 1.01
    limit = process_memory.limit()
    assert limit.num_bytes > resident
    assert limit.by
