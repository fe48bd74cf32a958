"""An LSTM with a penalty whose backward is native code that checks its input and aborts."""
import ctypes

import torch
from torch import nn

libc = ctypes.CDLL(None)


class SparsePenalty(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.abs().mean()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        SparsePenalty.calls += 1
        if SparsePenalty.calls == 25:
            libc.abort()
        return gradient * x.sign() / x.numel()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, tokens):
        states, _ = self.lstm(self.embed(tokens))
        return self.head(states), states


torch.manual_seed(0)
torch.set_num_threads(1)
model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(60):
    tokens = torch.randint(20, (16, 12))
    logits, states = model(tokens)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), (tokens % 2).flatten()) + 0.01 * SparsePenalty.apply(states)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
