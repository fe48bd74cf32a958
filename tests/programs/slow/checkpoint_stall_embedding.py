"""A model of words; the latest state is written to disk every other step, in case the machine goes down."""
import os
import tempfile
import time

import torch
from torch import nn

CHUNK, WARM = 40, 2
EVERY = 2


def training():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(20_000, 96), nn.Flatten(), nn.Linear(4 * 96, 512), nn.ReLU(), nn.Linear(512, 200))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5, fused=True)
    words, following = torch.randint(20_000, (5000, 4)), torch.randint(200, (5000,))
    following = words.sum(1) % 200
    with tempfile.TemporaryDirectory() as folder:
        for step in range(10_000):
            rows = torch.randint(len(words), (512,))
            loss = nn.functional.cross_entropy(net(words[rows]), following[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
            if step % EVERY == 0:
                torch.save({"model": net.state_dict(), "optimizer": opt.state_dict(), "step": step}, os.path.join(folder, "last.pt"))
            yield loss


if __name__ == "__main__":
    began = time.perf_counter()
    for step, loss in enumerate(training()):
        if step >= 70 and time.perf_counter() - began > 3:  # a fast machine takes more steps
            break
    print(f"loss {loss.item():.3f}")
