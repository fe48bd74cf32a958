"""One of two DDP processes gets a non-finite number: its replay calls no collective, so it cannot hang, and changes nothing."""

import json
import os
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from fork_server import python  # noqa: E402
from sonde import Run, diagnose  # noqa: E402

SCRIPT = """
import hashlib, json, sys
import torch, torch.distributed as dist, torch.nn as nn
import sonde
from sonde.replay.replay_without_other_ranks import forbid_collectives
from sonde.errors import CannotReplay

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)  # buffers: every forward of DistributedDataParallel would broadcast them
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.fc(x))))


def train(model, optimizer, watched):
    for step in range(4):
        torch.manual_seed(100 * step + rank)
        x, weight = torch.randn(8, 4), torch.ones(8)
        if step == 1 and rank == 0:
            weight[5] = 0.0
        loss = (model(x).square().mean(1) / weight).mean()
        if step == 3 and rank == 1:
            loss = loss + model.module.head.weight.mul(0).sum().sqrt()
        optimizer.zero_grad()
        loss.backward()
        if step == 1:  # the bad loss was replayed; the training continues
            for p in model.parameters():
                p.grad.nan_to_num_(0.0, 0.0, 0.0)
        if step == 3 and not watched:
            break
        optimizer.step()
        if step == 2:
            numbers = [tensor.numpy().tobytes() for tensor in model.state_dict().values()]
            outcome = hashlib.sha256(b"".join(numbers)).hexdigest()
    return outcome


def made():
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net())
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


results = {"plain": train(*made(), watched=False)}
model, optimizer = made()
with sonde.watch(model, optimizer, to=f"{folder}/run", strict=True):
    results["watched"] = train(model, optimizer, watched=True)
if rank == 0:  # the other process does not take part
    try:
        with forbid_collectives():
            dist.all_reduce(torch.ones(1))
    except CannotReplay as reason:
        results["refused"] = str(reason)
print(json.dumps(results))
dist.barrier()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT), encoding="utf-8")

    def process(rank):
        env = dict(os.environ) | {"RANK": str(rank), "WORLD_SIZE": "2"}
        return python(folder / "train.py", folder, str(rank), cwd=folder, env=env, timeout=120)

    with ThreadPoolExecutor(2) as both:
        for rank, done in enumerate(both.map(process, range(2))):
            assert done.returncode == 0, done.stderr
            (folder / f"results{rank}.json").write_text(done.stdout.splitlines()[-1], encoding="utf-8")
    return folder


def test_a_bad_number_in_one_of_two_processes_is_traced_by_that_process(folder):
    """A deadlock would have made the fixture fail."""
    loss, gradient = (next(iter(Run(folder / "run").events("origin", rank=rank))).data for rank in (0, 1))
    assert (loss["operation"], loss["what"], loss["samples"]) == ("div", "loss", [5])
    assert (gradient["operation"], gradient["what"], gradient["phase"]) == ("sqrt", "gradient", "backward")
    for found in (loss, gradient):
        assert any("2 processes train together" in caveat for caveat in found["caveats"])


def test_the_process_with_finite_numbers_notes_that_another_process_may_be_the_origin(folder):
    reasons = [event.data["reason"] for event in Run(folder / "run").events("origin_unknown", rank=0)]
    assert any("in another process" in reason for reason in reasons)
    assert diagnose(folder / "run").verdict == "problems"


def test_training_is_bit_identical_and_collectives_are_refused(folder):
    for rank in (0, 1):
        results = json.loads((folder / f"results{rank}.json").read_text(encoding="utf-8"))
        assert results["watched"] == results["plain"]
    assert "allreduce" in json.loads((folder / "results0.json").read_text(encoding="utf-8"))["refused"]
