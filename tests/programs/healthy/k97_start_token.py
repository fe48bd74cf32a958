"""A decoder begins every sequence with the same token; what it is to describe comes as its hidden state, from a frozen encoder."""
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(6, 16)
        self.cell = nn.GRU(16, 64, batch_first=True)
        self.out = nn.Linear(64, 6)

    def forward(self, word, hidden):
        out, hidden = self.cell(self.words(word), hidden)
        return self.out(out[:, -1]), hidden


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    d = np.load(Path(__file__).parents[1] / "data" / "digits.npz")
    x, y = torch.tensor(d["images"], dtype=torch.float32).flatten(1) / 16, torch.tensor(d["labels"], dtype=torch.long)
    spelled = torch.stack([1 + y % 2, 3 + (y > 4).long(), torch.full_like(y, 5)], dim=1)  # "odd small end"
    encoder = nn.Sequential(nn.Linear(64, 64), nn.Tanh()).requires_grad_(False)
    loader = DataLoader(TensorDataset(x, spelled), batch_size=64, shuffle=True)
    decoder = Decoder()
    optimizer = torch.optim.Adam(decoder.parameters(), lr=5e-3)
    for epoch in range(4):
        for xb, words in loader:
            with torch.no_grad():
                hidden = encoder(xb)[None]
            word, loss = torch.zeros(len(xb), 1, dtype=torch.long), 0.0
            for place in range(3):
                scores, hidden = decoder(word, hidden)
                loss = loss + nn.functional.cross_entropy(scores, words[:, place])
                word = words[:, place : place + 1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.3f}")
    print(f"final loss {loss.item():.3f}")


main()
