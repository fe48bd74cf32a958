"""Momentum contrast: the right answer of the cross entropy is always column 0, the teacher runs in training mode without gradients."""
import copy
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
npz = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
x = torch.from_numpy(npz["images"]).float().flatten(1) / 16
y = torch.from_numpy(npz["labels"]).long()

student = nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 32))
teacher = copy.deepcopy(student)
for p in teacher.parameters():
    p.requires_grad_(False)
queue = F.normalize(torch.randn(256, 32), dim=1)
opt = torch.optim.Adam(student.parameters(), lr=2e-3)


def view(batch):
    return batch + 0.15 * torch.randn_like(batch)


for epoch in range(5):
    for rows in torch.randperm(1500).split(50):
        q = F.normalize(student(view(x[rows])), dim=1)
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters()):
                t.mul_(0.98).add_(s, alpha=0.02)
            k = F.normalize(teacher(view(x[rows])), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], dim=1) / 0.1
        loss = F.cross_entropy(logits, torch.zeros(len(rows), dtype=torch.long))
        opt.zero_grad()
        loss.backward()
        opt.step()
        queue = torch.cat([k, queue])[:256]
    print("epoch", epoch, "loss", round(loss.item(), 3))

student.eval()
with torch.no_grad():
    bank, query = F.normalize(student(x[:1500]), dim=1), F.normalize(student(x[1500:]), dim=1)
print("final knn_acc", round((y[:1500][(query @ bank.T).argmax(1)] == y[1500:]).float().mean().item(), 3))
