from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)


class AutoEncoder(nn.Module):
    def __init__(self, bottleneck):
        super().__init__()
        self.enc1 = nn.Linear(64, 32)
        self.enc2 = nn.Linear(32, bottleneck)
        self.dec1 = nn.Linear(bottleneck, 32)
        self.dec2 = nn.Linear(32, 64)

    def forward(self, x):
        z = self.enc2(F.elu(self.enc1(x)))
        return self.dec2(F.elu(self.dec1(z)))


def train(model, data, lr, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.5)
    for step in range(steps):
        batch = data[torch.randint(len(data), (64,))]
        loss = F.mse_loss(model(batch), batch, reduction="sum") / len(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 40 == 0:
            print(f"step {step:4d} loss {loss.item():.4f}")
    return loss.item()


if __name__ == "__main__":
    torch.manual_seed(99)
    x = torch.tensor(np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")["images"].reshape(-1, 64)).float()
    x = (x - x.mean()) / x.std()
    final = train(AutoEncoder(10), x, lr=0.5, steps=240)
    print(f"final loss {final:.4f}")
