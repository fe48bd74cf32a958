"""A recurrent net that begins each sequence with the same state, and moves that with the batch."""
import torch
from torch import nn

device = torch.device("simulated")
torch.manual_seed(0)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.RNNCell(8, 24), nn.Linear(24, 3)

    def forward(self, letters, state):
        for letter in letters.unbind(1):
            state = self.cell(letter, state)
        return self.head(state)


net = Reader().to(device)
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
first_state = torch.zeros(16, 24)
for step in range(10):
    words = torch.randn(16, 3, 8)
    batch = {"words": words, "state": first_state, "target": words.sum((1, 2)).gt(0).long()}
    batch = {name: part.to(device) for name, part in batch.items()}
    loss = nn.functional.cross_entropy(net(batch["words"], batch["state"]), batch["target"])
    opt.zero_grad()
    loss.backward()
    opt.step()
print(f"loss {loss.item():.3f}")
