# denoising autoencoder with batch norm
from pathlib import Path
import numpy as np
import torch
from torch import nn

torch.manual_seed(19)
torch.set_num_threads(1)

x = torch.from_numpy(np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")["images"]).float().flatten(1) / 16


class DenoisingAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 16))
        self.decode = nn.Sequential(nn.Linear(16, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 64))

    def forward(self, v):
        return self.decode(self.encode(v))


def count_parameters(net):
    net.eval()
    with torch.no_grad():
        shape = tuple(net(torch.zeros(1, 64)).shape)
    return sum(p.numel() for p in net.parameters()), shape


net = DenoisingAE()
print("parameters and output", count_parameters(net))
opt = torch.optim.RMSprop(net.parameters(), lr=2e-3)
for epoch in range(8):
    for clean in x[torch.randperm(1797)[:1750]].split(50):
        noisy = clean + 0.2 * torch.randn_like(clean)
        loss = (net(noisy) - clean).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("epoch", epoch, round(loss.item(), 5))
print("final mse", round(loss.item(), 5))
