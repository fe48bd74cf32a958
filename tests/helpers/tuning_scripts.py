"""Training scripts that know nothing of Sonde, for trials."""

SLOW = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
torch.set_num_threads(1)

class Slow(Dataset):
    def __len__(self):
        return 3200
    def __getitem__(self, index):
        time.sleep(0.002)  # a slow disk
        return torch.full((4,), index / 3200)

class Remote(torch.optim.SGD):
    # Each parameter that is updated by itself is a trip of its own. Waiting is the same on a busy machine, computing is not.
    def step(self, closure=None):
        at_once = self.defaults["fused"] or self.defaults["foreach"]
        time.sleep(0.0005 * (1 if at_once else sum(len(group["params"]) for group in self.param_groups)))
        return super().step(closure)

loader = DataLoader(Slow(), batch_size=16, shuffle=True{loader})
model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(30)))
optimizer = Remote(model.parameters(), lr=1e-3, {optimizer})
for x in loader:
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

SMALL = """
import argparse, atexit, os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        worker = torch.utils.data.get_worker_info()
        if index == 0 and worker is not None:
            print("made by worker", worker.id, "of", worker.num_workers, flush=True)
        return torch.full((3, 8, 8), index / 400)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 1)
    def forward(self, x):
        h = self.body(x)
        print("inside", h.dtype, x.is_contiguous(memory_format=torch.channels_last), self.training, torch.get_num_threads())
        return self.head(h.mean((2, 3)))

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--save", default="")
    options = parser.parse_args()
    loader = DataLoader(Numbers(), 8)
    check = DataLoader(Numbers(), batch_size=100)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    num = 0
    try:
        for epoch in range(10):
            for x in loader:
                if num == options.steps:
                    return
                if num == options.fail_at:
                    raise ValueError("row 7 is bad")
                out = model(x)
                print("out", out.dtype)
                loss = (out - 1).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                num += 1
                if num == 10:
                    with torch.no_grad():
                        for x in check:
                            model(x)
    finally:
        if options.save:
            open(options.save, "w").write("saved")
            atexit.register(open, options.save + ".atexit", "w")

if __name__ == "__main__":
    main()
"""
