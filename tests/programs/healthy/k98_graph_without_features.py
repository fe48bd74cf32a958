"""The nodes of a graph have no features: each is given a 1, and the edges say the rest."""
import torch
from torch import nn


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(1, 32), nn.Linear(32, 2)

    def forward(self, x, edges):
        for layer in (self.first, self.second):
            x = layer(x + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]))
            x = x.relu() if layer is self.first else x
        return x


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    num_nodes = 120
    edges = torch.stack([torch.randint(0, num_nodes, (600,)), (torch.rand(600).square() * num_nodes).long()])
    degree = torch.bincount(edges[1], minlength=num_nodes)
    labels = (degree > degree.median()).long()
    model = GraphNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(150):
        loss = nn.functional.cross_entropy(model(torch.ones(num_nodes, 1), edges), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            print(f"step {step} loss {loss.item():.3f}")
    print(f"final acc {(model(torch.ones(num_nodes, 1), edges).argmax(1) == labels).float().mean().item():.3f}")


main()
