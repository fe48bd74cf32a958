"""Max pooling over the valid part of each sequence."""
import torch
from torch import nn
import torch.nn.functional as F


class MaxPool(nn.Module):
    def forward(self, x, lengths):
        valid = torch.arange(x.shape[1]) < lengths[:, None]
        x = x.masked_fill(~valid.unsqueeze(-1), -float("inf"))
        return x.max(dim=1).values


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 24, batch_first=True)
        self.pool = MaxPool()
        self.out = nn.Linear(24, 2)

    def forward(self, x, lengths):
        return self.out(self.pool(self.gru(x)[0], lengths))


torch.manual_seed(4)
torch.set_num_threads(1)
model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(80):
    x = torch.randn(24, 8, 3)
    lengths = torch.randint(2, 9, (24,))
    valid = torch.arange(8) < lengths[:, None]
    y = (x[..., 0].masked_fill(~valid, -9).amax(1) > 1.2).long()
    loss = F.cross_entropy(model(x, lengths), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("final loss", loss.item())
