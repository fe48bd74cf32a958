"""Elman network that has to remember the first symbol for 40 steps."""
import torch
from torch import nn

torch.manual_seed(5)
torch.set_num_threads(1)
T, K, H = 40, 4, 48


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(K, H, nonlinearity="relu", batch_first=True)
        self.readout = nn.Linear(H, K)
        nn.init.orthogonal_(self.rnn.weight_hh_l0, gain=1.6)
        nn.init.normal_(self.rnn.weight_ih_l0, std=0.3)
        nn.init.zeros_(self.rnn.bias_ih_l0)
        nn.init.zeros_(self.rnn.bias_hh_l0)

    def forward(self, s):
        return self.readout(self.rnn(s)[0][:, -1])


def batch(n):
    label = torch.randint(0, K, (n,))
    s = torch.zeros(n, T, K)
    s[torch.arange(n), 0, label] = 1.0
    s[:, 1:] += 0.02 * torch.randn(n, T - 1, K)
    return s, label


net = Memory()
optimizer = torch.optim.SGD(net.parameters(), lr=0.005, momentum=0.9)
for step in range(300):
    s, label = batch(40)
    loss = nn.functional.cross_entropy(net(s), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4g}")
s, label = batch(400)
with torch.no_grad():
    print(f"final acc {(net(s).argmax(1) == label).float().mean():.3f}")
