"""Up or down tomorrow: log-returns of a simulated price, attention over the last twelve days."""
import numpy as np
import torch
from torch import nn

torch.manual_seed(2)
torch.set_num_threads(1)
rng = np.random.default_rng(2)


def prices(days=1500):
    momentum, p, out = 0.0, 100.0, []
    for _ in range(days):
        momentum = 0.9 * momentum + rng.normal(0, 0.004)
        p *= np.exp(momentum + rng.normal(0, 0.004))
        out.append(p)
    out = np.array(out)
    out[[640, 641]] = 0.0  # exchange closed
    return out


close = prices()
with np.errstate(all="ignore"):
    returns = np.diff(np.log(close)).astype(np.float32) * 100
windows = np.lib.stride_tricks.sliding_window_view(returns, 13)
x = torch.tensor(windows[:, :12])[:, :, None]
y = torch.tensor(windows[:, 12] > 0).float()


class Attend(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.inp = nn.Linear(1, d)
        self.pos = nn.Parameter(0.1 * torch.randn(12, d))
        self.enc = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(d, 2, 32, dropout=0.0, batch_first=True), 1, enable_nested_tensor=False
        )
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        return self.out(self.enc(self.inp(x) + self.pos)[:, -1]).squeeze(1)


model = Attend()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
bce = nn.BCEWithLogitsLoss()
for epoch in range(6):
    for i in range(0, 1200, 40):
        loss = bce(model(x[i:i + 40]), y[i:i + 40])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
with torch.no_grad():
    acc = ((model(x[1200:]) > 0).float() == y[1200:]).float().mean()
print(f"final acc {acc.item():.3f}")
