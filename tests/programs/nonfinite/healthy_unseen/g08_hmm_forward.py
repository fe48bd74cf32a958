"""A hidden Markov model in log space: forbidden transitions have a probability of zero, a log of -inf."""
import torch
from torch import nn


class HMM(nn.Module):
    def __init__(self, states=4, symbols=6):
        super().__init__()
        self.emit = nn.Parameter(0.1 * torch.randn(states, symbols))
        self.stay = nn.Parameter(torch.zeros(states))
        forbidden = torch.ones(states, states).triu(2).bool() | torch.ones(states, states).tril(-1).bool()
        self.register_buffer("forbidden", forbidden)

    def forward(self, seq):
        n = len(self.stay)
        move = torch.diag(self.stay).masked_fill(self.forbidden, float("-inf")).log_softmax(1)
        emit = self.emit.log_softmax(1)
        alpha = torch.full((len(seq), n), float("-inf"))
        alpha[:, 0] = 0.0
        alpha = alpha + emit[:, seq[:, 0]].t()
        for t in range(1, seq.size(1)):
            alpha = torch.logsumexp(alpha.clamp(min=-1e4)[:, :, None] + move, dim=1) + emit[:, seq[:, t]].t()
        return alpha.logsumexp(1)


torch.manual_seed(7)
data = torch.cat([torch.randint(3 * k // 2, 3 * k // 2 + 2, (96, 3)) for k in range(3)], dim=1)
hmm = HMM()
opt = torch.optim.Adam(hmm.parameters(), lr=3e-2)
for epoch in range(6):
    for part in data.split(12):
        loss = -hmm(part).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
