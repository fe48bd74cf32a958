"""Regression whose data come from helper processes, some of which are killed by a signal and replaced.

The training itself goes on to its end. It also uses faulthandler, for a file of its own, as people do who look for such deaths.
"""
import faulthandler
import os
import signal
import tempfile

import torch
from torch import nn


def batch_from_helper(seed):
    """A forked process makes a batch; every tenth one dies of an illegal instruction before it is done."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        if seed % 10 == 3:
            signal.signal(signal.SIGILL, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGILL)
        os.write(writing, b"ready")
        os._exit(0)
    os.close(writing)
    answer = os.read(reading, 5)
    os.close(reading)
    os.waitpid(child, 0)
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(seed))
    return x if answer == b"ready" else None


torch.manual_seed(0)
torch.set_num_threads(1)
stacks = tempfile.TemporaryFile("w")
faulthandler.enable(stacks)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for seed in range(120):
    x = batch_from_helper(seed)
    if x is None:
        continue
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("loss", loss.item())
