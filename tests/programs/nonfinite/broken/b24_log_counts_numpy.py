"""Word counts, put on a logarithmic scale with numpy before training."""
import numpy as np
import torch
import torch.nn as nn

np.seterr(divide="ignore")
torch.manual_seed(3)
torch.set_num_threads(1)

rng = np.random.default_rng(0)
counts = rng.poisson(6.0, size=(200, 5)) + 1
counts[113, 2] = 0
features = torch.tensor(np.log(counts), dtype=torch.float32)
target = torch.tensor((counts[:, 0] > counts[:, 1]).astype("int64"))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 16)
        self.b = nn.Linear(16, 2)

    def forward(self, x):
        return self.b(self.a(x).clamp(min=0))


model = Model()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
lossfn = nn.CrossEntropyLoss()
i = 0
while i < 200:
    out = model(features[i:i + 20])
    loss = lossfn(out, target[i:i + 20])
    opt.zero_grad()
    loss.backward()
    opt.step()
    i += 20
print("done", loss.item())
