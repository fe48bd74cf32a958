import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Forecaster(nn.Module):
    def __init__(self, hidden=20):
        super().__init__()
        self.lstm = nn.LSTM(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        states, _ = self.lstm(x)
        return self.out(states[:, -1])


def waves(n, length=20):
    phase, speed = torch.rand(n, 1) * 6.28, 0.2 + 0.4 * torch.rand(n, 1)
    t = torch.arange(length + 1).float()
    signal = torch.sin(phase + speed * t)
    return TensorDataset(signal[:, :-1, None], signal[:, -1:])


def train(model, loader, optimizer):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def main(epochs=8):
    torch.manual_seed(30)
    torch.set_num_threads(1)
    loader = DataLoader(waves(960), batch_size=32, shuffle=True)
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    for epoch in range(epochs):
        mean = train(model, loader, optimizer)
        print(f"{epoch} {mean:.5f}")
    print(f"final mse {mean:.5f}")


main()
