"""Monte-Carlo dropout: the dropout stays on at prediction time, several passes are averaged and give an uncertainty."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class BayesianNet(nn.Module):
    def __init__(self, p=0.3):
        super().__init__()
        self.p = p
        self.fc1 = nn.Linear(64, 128)
        self.fc2 = nn.Linear(128, 64)
        self.fc3 = nn.Linear(64, 10)

    def forward(self, x):
        # training=True always, on purpose: a pass is one sample of the posterior
        x = F.dropout(F.relu(self.fc1(x)), self.p, training=True)
        x = F.dropout(F.relu(self.fc2(x)), self.p, training=True)
        return self.fc3(x)


@torch.no_grad()
def predict(model, x, passes=20):
    model.eval()
    probs = torch.stack([model(x).softmax(-1) for _ in range(passes)])
    return probs.mean(0), probs.std(0).mean(-1)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    npz = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    x = torch.from_numpy(npz["images"]).float().flatten(1) / 16
    y = torch.from_numpy(npz["labels"]).long()
    idx = torch.randperm(len(x))
    tr, va = idx[:1440], idx[1440:]
    model = BayesianNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(9):
        model.train()
        for rows in tr[torch.randperm(len(tr))].split(36):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
        mean, spread = predict(model, x[va])
        right = mean.argmax(1) == y[va]
        print(f"epoch {epoch} loss {loss.item():.3f} acc {right.float().mean():.3f} spread right {spread[right].mean():.4f} wrong {spread[~right].mean():.4f}")
    print(f"final val_acc {right.float().mean().item():.3f}")


if __name__ == "__main__":
    main()
