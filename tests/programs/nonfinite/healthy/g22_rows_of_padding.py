"""Rows of padding are marked with NaN, so that nobody uses them by mistake; neither the loss nor the metric looks at them."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.out = nn.Linear(16, 3)

    def forward(self, tokens):
        words = tokens > 0
        h = self.embed(tokens)
        scores = (self.q(h) @ self.k(h).transpose(1, 2) / 4).masked_fill(~words[:, None], float("-inf"))
        out = self.out(h + F.softmax(scores, -1) @ self.v(h))
        return out.masked_fill(~words[:, :, None], float("nan"))


def sentences(num):
    tokens = torch.randint(1, 30, (num, 7))
    tokens[torch.arange(7)[None] >= torch.randint(2, 8, (num, 1))] = 0
    return tokens, tokens % 3


torch.manual_seed(0)
torch.set_num_threads(1)
model = Tagger()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(60):
    tokens, tags = sentences(32)
    inside = tokens > 0
    opt.zero_grad()
    F.cross_entropy(model(tokens)[inside], tags[inside]).backward()
    opt.step()
    if step % 10 == 9:
        model.eval()
        with torch.no_grad():
            tokens, tags = sentences(64)
            inside = tokens > 0
            accuracy = (model(tokens)[inside].argmax(1) == tags[inside]).float().mean().item()
        model.train()
print("accuracy", round(accuracy, 3))
