import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
import torch.utils.data as data


class Simulation(IterableDataset):
    """Runs an experiment once per epoch and yields what it measures."""

    def __init__(self, num=640):
        self.num = num

    def experiment(self):
        g = torch.Generator().manual_seed(11)
        for i in range(self.num):
            v = torch.rand(6, generator=g)
            yield i, v, (v[:3].sum() - v[3:].prod()).unsqueeze(0)

    def __iter__(self):
        for i, v, y in self.experiment():
            yield v, y


torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(Simulation(), batch_size=32, num_workers=2)
net = nn.Sequential(nn.Linear(6, 32), nn.SiLU(), nn.Linear(32, 1))
opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
for epoch in range(4):
    for v, y in loader:
        loss = (net(v) - y).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
