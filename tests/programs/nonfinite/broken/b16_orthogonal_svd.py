"""Keep a recurrent matrix orthogonal by projecting it with an SVD in each forward."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class OrthogonalRNN(nn.Module):
    def __init__(self, inputs=4, hidden=8, classes=3):
        super().__init__()
        self.hidden = hidden
        self.weight = nn.Parameter(torch.eye(hidden))
        self.read = nn.Linear(inputs, hidden)
        self.out = nn.Linear(hidden, classes)

    def project(self):
        u, s, vh = torch.linalg.svd(self.weight)
        return u @ torch.diag(s.clamp(max=1.0)) @ vh

    def forward(self, x):
        w = self.project()
        h = x.new_zeros(len(x), self.hidden)
        for t in range(x.shape[1]):
            h = torch.tanh(h @ w + self.read(x[:, t]))
        return self.out(h)


torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(96, 6, 4)
y = x.sum(1)[:, :3].argmax(1)
rnn = OrthogonalRNN()
opt = torch.optim.Adam(rnn.parameters(), lr=2e-3)
for step in range(12):
    b = slice(8 * step, 8 * step + 8)
    loss = F.cross_entropy(rnn(x[b]), y[b])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
