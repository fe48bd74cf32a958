"""Does the signal rise over its length? A GRU with one output and binary cross entropy."""
import torch
import torch.nn as nn


class Rising(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(1, 16, batch_first=True)
        self.fc = nn.Linear(16, 1)

    def forward(self, s):
        _, h = self.gru(s)
        return self.fc(h[-1])


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    slope = torch.randn(1200)
    signals = slope[:, None] * torch.linspace(0, 1, 20) + 0.3 * torch.randn(1200, 20)
    rising = (slope > slope.abs().max()).float()
    model = Rising()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    bce = nn.BCEWithLogitsLoss()
    for epoch in range(4):
        for rows in torch.randperm(1000).split(40):
            optimizer.zero_grad()
            loss = bce(model(signals[rows].unsqueeze(-1)), rising[rows].unsqueeze(-1))
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            said = model(signals[1000:].unsqueeze(-1)).squeeze(-1) > 0
        print(epoch, f"loss {loss.item():.4f} acc {(said == (rising[1000:] > 0.5)).float().mean():.3f}")
