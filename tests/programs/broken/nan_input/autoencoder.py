"""Outlier detection on machine data: min-max scaling, then a small autoencoder."""
import torch
import torch.nn as nn


def machine_data(n):
    load = torch.rand(n, 1)
    speed = 0.7 * load + 0.05 * torch.randn(n, 1)
    heat = load ** 2 + 0.05 * torch.randn(n, 1)
    mode = torch.full((n, 1), 3.0)
    vibration = (speed - heat).abs() + 0.02 * torch.randn(n, 1)
    return torch.cat([load, speed, heat, mode, vibration], 1)


def min_max(table):
    low, high = table.min(0).values, table.max(0).values
    return (table - low) / (high - low)


class AE(nn.Module):
    def __init__(self, n, k=2):
        super().__init__()
        self.down = nn.Sequential(nn.Linear(n, 16), nn.Tanh(), nn.Linear(16, k))
        self.up = nn.Sequential(nn.Linear(k, 16), nn.Tanh(), nn.Linear(16, n))

    def forward(self, x):
        return self.up(self.down(x))


def main():
    torch.manual_seed(44)
    torch.set_num_threads(1)
    data = min_max(machine_data(1000))
    model = AE(data.size(1))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    for epoch in range(10):
        for batch in torch.utils.data.DataLoader(data, batch_size=50, shuffle=True):
            loss = nn.functional.mse_loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} mse {loss.item():.5f}")
    print(f"final mse {loss.item():.5f}")


main()
