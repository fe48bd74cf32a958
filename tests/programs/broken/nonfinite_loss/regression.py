import torch
import torch.nn as nn


def make_sales(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 4, generator=g)
    demand = 60 * x[:, 0] ** 2 + 25 * x[:, 1] - 30 * x[:, 2] + 4 * torch.randn(n, generator=g)
    return x, demand.clamp(min=0).round()


class RMSLE(nn.Module):
    """Root mean squared logarithmic error."""

    def forward(self, prediction, target):
        return torch.sqrt(torch.mean((torch.log1p(prediction) - torch.log1p(target)) ** 2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(4, 32)
        self.l2 = nn.Linear(32, 32)
        self.l3 = nn.Linear(32, 1)
        nn.init.constant_(self.l3.bias, 5.0)

    def forward(self, x):
        x = nn.functional.leaky_relu(self.l1(x))
        x = nn.functional.leaky_relu(self.l2(x))
        return self.l3(x).squeeze(-1)


def main():
    torch.manual_seed(13)
    torch.set_num_threads(1)
    x, y = make_sales(800, 1)
    xv, yv = make_sales(200, 2)
    model, metric = Model(), RMSLE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(12):
        for i in range(0, 800, 50):
            optimizer.zero_grad()
            loss = metric(model(x[i:i + 50]), y[i:i + 50])
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            val = metric(model(xv), yv)
        print(f"epoch {epoch:2d} train {loss.item():.4f} val {val.item():.4f}")
    print(f"final val_rmsle {val.item():.4f}")


if __name__ == "__main__":
    main()
