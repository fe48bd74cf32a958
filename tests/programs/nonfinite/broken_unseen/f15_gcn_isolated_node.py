"""Graph convolution in plain torch. Edge dropout now and then leaves a node without neighbours."""
import torch
import torch.nn.functional as F
from torch import nn


class GCNConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.lin = nn.Linear(i, o)

    def forward(self, h, adj):
        deg = adj.sum(1)
        d = deg.pow(-0.5)
        norm = d[:, None] * adj * d[None, :]
        return norm @ self.lin(h)


class GCN(nn.Module):
    def __init__(self, i, hidden, o):
        super().__init__()
        self.conv1 = GCNConv(i, hidden)
        self.conv2 = GCNConv(hidden, o)

    def forward(self, x, adj):
        x = F.relu(self.conv1(x, adj))
        x = F.dropout(x, 0.2, self.training)
        return self.conv2(x, adj)


def ring(n):
    adj = torch.eye(n).roll(1, 0)
    return adj + adj.t()


def run():
    torch.manual_seed(8)
    n = 30
    x, adj = torch.randn(n, 5), ring(n)
    y = torch.randint(0, 3, (n,))
    mask = torch.rand(n) < 0.7
    model = GCN(5, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for epoch in range(30):
        dropped = adj.clone()
        if epoch == 17:
            dropped[4, :] = 0.0
            dropped[:, 4] = 0.0
        optimizer.zero_grad()
        out = model(x, dropped)
        loss = F.cross_entropy(out[mask], y[mask])
        loss.backward()
        optimizer.step()
        if epoch % 10 == 0:
            print(epoch, loss.item())


if __name__ == "__main__":
    run()
