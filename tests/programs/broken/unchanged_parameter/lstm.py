# LSTM language model over a small alphabet; fixed-point weights: rounded after every step
import torch
from torch import nn

torch.manual_seed(15)
torch.set_num_threads(1)

V, T, H = 8, 16, 32
BITS = 2


class CharLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, 12)
        self.lstm = nn.LSTM(12, H, batch_first=True)
        self.out = nn.Linear(H, V)

    def forward(self, t):
        return self.out(self.lstm(self.emb(t))[0])


def quantise(w):
    scale = 2.0 ** BITS
    return torch.round(w * scale) / scale


def batch(n):
    # counts up, jumps back when it meets its own first symbol
    first = torch.randint(0, V, (n, 1))
    step = torch.randint(1, 3, (n, 1))
    return (first + step * torch.arange(T + 1)) % V


net = CharLSTM()
recurrent = [net.lstm.weight_hh_l0, net.lstm.weight_ih_l0]
for w in recurrent:
    w.data = quantise(w.data)
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for it in range(250):
    s = batch(32)
    loss = nn.functional.cross_entropy(net(s[:, :-1]).transpose(1, 2), s[:, 1:])
    opt.zero_grad()
    loss.backward()
    opt.step()
    for w in recurrent:
        w.data = quantise(w.data)
    if it % 50 == 0:
        print(it, round(loss.item(), 4))
print(f"final loss {loss.item():.4f}")
