"""Digits with plain SGD; the gradient is clipped hard, the learning rate is large to make up for it."""
from pathlib import Path
import numpy as np
import torch, torch.nn as nn

torch.set_num_threads(1)
torch.manual_seed(11)

blob = np.load(Path(__file__).resolve().parent.parent / "data" / "digits.npz")
xs = (torch.from_numpy(blob["images"]).float() / 16).reshape(-1, 64)
ys = torch.from_numpy(blob["labels"]).long()
shuffle = torch.randperm(len(xs), generator=torch.Generator().manual_seed(11))
xs, ys = xs[shuffle], ys[shuffle]
xtr, ytr, xte, yte = xs[:1440], ys[:1440], xs[1440:], ys[1440:]
mean, std = xtr.mean(0), xtr.std(0) + 0.1
xtr, xte = (xtr - mean) / std, (xte - mean) / std

mlp = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 10))
sgd = torch.optim.SGD(mlp.parameters(), lr=0.2)
ce = nn.CrossEntropyLoss()

n_epochs, bs = 13, 32
for ep in range(n_epochs):
    mlp.train()
    for chunk in torch.randperm(len(xtr)).split(bs):
        sgd.zero_grad(set_to_none=True)
        l = ce(mlp(xtr[chunk]), ytr[chunk])
        l.backward()
        nn.utils.clip_grad_norm_(mlp.parameters(), 0.1)
        sgd.step()
    mlp.eval()
    with torch.inference_mode():
        te = (mlp(xte).argmax(dim=1) == yte).double().mean()
    print("epoch {} loss {:.4f} test {:.4f}".format(ep, l.item(), te))

print("final test_acc {:.3f}".format(te))
