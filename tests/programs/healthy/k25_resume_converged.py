"""Train, checkpoint, and resume a run that had converged already."""
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn

torch.set_num_threads(1)


def make():
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    return net, torch.optim.Adam(net.parameters(), lr=0.03)


def epochs(net, opt, x, y, first, last):
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(first, last):
        worst = 0.0
        for rows in torch.randperm(len(x)).split(64):
            opt.zero_grad()
            loss = loss_fn(net(x[rows]), y[rows])
            loss.backward()
            opt.step()
            worst = max(worst, loss.item())
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1} worst batch loss {worst:.2e}")


def save(path, net, opt, epoch):
    torch.save({"epoch": epoch, "model": net.state_dict(), "optimizer": opt.state_dict()}, path)


def load(path, net, opt):
    ckpt = torch.load(path, weights_only=True)
    net.load_state_dict(ckpt["model"])
    opt.load_state_dict(ckpt["optimizer"])
    return ckpt["epoch"]


torch.manual_seed(6)
npz = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
order = torch.randperm(1797)
x = (torch.from_numpy(npz["images"]).float().flatten(1) / 16)[order]
y = torch.from_numpy(npz["labels"]).long()[order]
x_train, y_train, x_test, y_test = x[:384], y[:384], x[384:], y[384:]

with tempfile.TemporaryDirectory() as folder:
    ckpt_path = Path(folder) / "last.pt"
    model, optimizer = make()
    epochs(model, optimizer, x_train, y_train, 0, 60)
    save(ckpt_path, model, optimizer, 60)

    model, optimizer = make()
    start = load(ckpt_path, model, optimizer)
    print("resumed at epoch", start)
    epochs(model, optimizer, x_train, y_train, start, start + 30)

with torch.no_grad():
    acc = (model(x_test).argmax(1) == y_test).float().mean().item()
print(f"final test_acc {acc:.3f}")
