"""Early stopping that says why, and a schedule whose course is in the verdict.

Run it with:  python examples/early_stopping.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sonde

torch.manual_seed(0)
x = torch.randn(96, 6)
y = x[:, :1] * x[:, 1:2] + 0.5 * torch.randn(96, 1)  # few samples, much noise: the network will learn them by heart
loader = DataLoader(TensorDataset(x[:48], y[:48]), batch_size=16, shuffle=True)

model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 1))
with sonde.watch(model, name="stopping") as session:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    stopping = session.early_stopping("val_loss", patience=5, min_delta=0.001)
    for _epoch in range(100):
        for batch, target in loader:
            loss = nn.functional.mse_loss(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        with torch.no_grad():
            if stopping.step(nn.functional.mse_loss(model(x[48:]), y[48:])):
                break

print(stopping.why)
for word, sentence in session.report().run.summary:
    print(f"{word}: {sentence}")
