"""Insurance claims: most are small, some are hundreds of times as large, and all of them are true. Squared error, small batches."""
import torch
from torch import nn


def main():
    torch.manual_seed(5)
    torch.set_num_threads(1)
    x = torch.randn(6000, 6)
    noise = torch.distributions.StudentT(1.8).sample((6000,))
    y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0, 1.5, -1.0]) + 0.5 * noise
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(1):
        for rows in torch.randperm(6000).split(16):
            loss = (model(x[rows]).squeeze(1) - y[rows]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        error = (model(x).squeeze(1) - y).abs().median().item()
    print(f"final median_error {error:.3f}")


if __name__ == "__main__":
    main()
