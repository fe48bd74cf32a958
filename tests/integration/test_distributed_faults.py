"""A NaN on one of two ranks, with DDP and with FSDP2: no rank hangs, there is an answer or its reason, and both finish as a bare run."""

import json
import os
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from fork_server import python  # noqa: E402
from sonde import Run  # noqa: E402

SCRIPT = """
import hashlib, json, sys
import torch, torch.distributed as dist, torch.nn as nn
import sonde

kind, folder, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, optimizer):
    losses = []
    for step in range(8):
        torch.manual_seed(100 * step + rank)
        x, weight = torch.randn(8, 4), torch.ones(8)
        if step == 4 and rank == 1:
            weight[5] = -1.0
        loss = (model(x).square().mean(1) + weight.log()).mean()
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()
        losses.append(loss.item())
    numbers = [(p.to_local() if hasattr(p, "to_local") else p).detach().tolist() for p in model.parameters()]
    return hashlib.sha256(repr([losses, numbers]).encode()).hexdigest()


bare = train(*made())
model, optimizer = made()
with sonde.watch(model, optimizer, to=f"{folder}/run", strict=True):
    watched = train(model, optimizer)
print(json.dumps([bare, watched]))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_nan_on_one_rank_hangs_nobody_and_has_an_answer_or_its_reason(kind, tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT), encoding="utf-8")

    def process(rank):
        env = dict(os.environ) | {"RANK": str(rank), "WORLD_SIZE": "2"}
        return python(tmp_path / "train.py", kind, tmp_path, str(rank), cwd=tmp_path, env=env, timeout=100)

    with ThreadPoolExecutor(2) as both:
        for done in both.map(process, range(2)):
            assert done.returncode == 0, done.stderr
            bare, watched = json.loads(done.stdout.splitlines()[-1])
            assert watched == bare
    run = Run(tmp_path / "run")
    first = next(run.events("nonfinite", rank=1))
    assert (first.step, first.data["what"]) == (4, "loss")
    answers = [event for event_kind in ("origin", "origin_unknown") for event in run.events(event_kind, rank=1)]
    (answer,) = [event for event in answers if event.step == 4]
    if kind == "ddp":
        assert (answer.data["operation"], answer.data["samples"]) == ("log", [5])
        assert "weight.log()" in answer.data["text"]
    else:
        reason = "the weights are sharded over several processes, which would have to run the step again together"
        assert answer.data.get("operation") == "log" or answer.kind == "origin_unknown"
        assert reason in json.dumps(answer.data)
