"""Regression with a predicted variance, written by hand. A sensor glitch sits in row 100."""
import torch
from torch import Tensor, nn


class Heteroscedastic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 32), nn.SiLU())
        self.mean_head = nn.Linear(32, 1)
        self.log_prec_head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.mean_head(h), self.log_prec_head(h)


class GaussianNLL(nn.Module):
    def forward(self, mean: Tensor, log_prec: Tensor, target: Tensor) -> Tensor:
        var = torch.exp(-log_prec)
        misfit = (target - mean) ** 2 / var
        return 0.5 * (misfit - log_prec).mean()


def make_data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(9)
    x = torch.randn(192, 4, generator=g)
    y = x[:, :1] * 2 + 0.1 * torch.randn(192, 1, generator=g)
    x[100] = torch.tensor([30000.0, 0.0, 30000.0, 0.0])
    return x, y


def main() -> None:
    torch.manual_seed(4)
    model, criterion = Heteroscedastic(), GaussianNLL()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = make_data()
    for epoch in range(2):
        for xb, yb in zip(x.split(24), y.split(24)):
            optimizer.zero_grad()
            mean, log_prec = model(xb)
            loss = criterion(mean, log_prec, yb)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.4f}")


main()
