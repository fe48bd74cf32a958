"""A discrete autoencoder with Gumbel noise drawn in bfloat16."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class DiscreteCode(nn.Module):
    def __init__(self, codes=16, temperature=0.8):
        super().__init__()
        self.temperature = temperature
        self.book = nn.Embedding(codes, 6)

    def forward(self, logits):
        u = torch.rand(logits.shape, dtype=torch.bfloat16)
        noise = -torch.log(-torch.log(1 - u))
        weights = F.softmax((logits + noise.float()) / self.temperature, dim=-1)
        return weights @ self.book.weight


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 16))
        self.code = DiscreteCode()
        self.decode = nn.Linear(6, 10)

    def forward(self, x):
        return self.decode(self.code(self.encode(x)))


torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(256, 10)
model = Autoencoder()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(32):
    batch = x[(8 * step) % 256:(8 * step) % 256 + 8]
    loss = F.mse_loss(model(batch), batch)
    opt.zero_grad()
    loss.backward()
    opt.step()
print("loss", loss.item())
