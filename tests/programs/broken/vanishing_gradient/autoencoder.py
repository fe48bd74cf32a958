# very deep autoencoder
from pathlib import Path
import numpy as np, torch
from torch import nn

torch.manual_seed(77); torch.set_num_threads(1)
sizes = [64, 48, 40, 32, 24]
act = nn.Sigmoid

def stack(dims):
    mods = []
    for a, b in zip(dims[:-1], dims[1:]):
        mods += [nn.Linear(a, b), act()]
    return mods[:-1]

class DeepAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(*stack(sizes), act())
        self.decoder = nn.Sequential(*stack(sizes[::-1]))
    def forward(self, x):
        return self.decoder(self.encoder(x))

data = torch.tensor(np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")["images"].reshape(-1, 64)).float() / 16
data = (data - data.mean(0)) / (data.std(0) + 0.1)
net = DeepAE()
for m in net.modules():
    if isinstance(m, nn.Linear):
        nn.init.xavier_uniform_(m.weight)
sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
for step in range(400):
    b = data[torch.randint(0, len(data), (64,))]
    loss = nn.functional.mse_loss(net(b), b)
    sgd.zero_grad(); loss.backward(); sgd.step()
    if step % 100 == 0:
        print("step", step, "mse", loss.item())
with torch.no_grad():
    print("final mse", nn.functional.mse_loss(net(data), data).item(), "variance", data.var().item())
