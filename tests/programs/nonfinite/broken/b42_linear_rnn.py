"""A recurrent net without a squashing function, on long sequences."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Cell(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.inp = nn.Linear(inputs, hidden)
        self.w = nn.Parameter(torch.randn(hidden, hidden) * 0.6)

    def forward(self, x, h):
        return F.relu(self.inp(x) + h @ self.w)


class LongRNN(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.hidden = hidden
        self.cell = Cell(2, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        h = torch.zeros(x.shape[0], self.hidden)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.out(h)


torch.manual_seed(3)
torch.set_num_threads(1)
model = LongRNN()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(5):
    length = 20 if step < 3 else 200
    x = torch.randn(6, length, 2)
    y = x.sum((1, 2)).unsqueeze(1)
    loss = F.l1_loss(torch.tanh(model(x)), torch.tanh(y))
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    print(step, loss.item())
