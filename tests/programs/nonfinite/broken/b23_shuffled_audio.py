"""Keyword spotting on tiny spectrograms, shuffled with a seeded generator."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(6, 16, batch_first=True)
        self.classify = nn.Linear(16, 3)

    def forward(self, frames):
        _, last = self.gru(frames)
        return self.classify(last[0])


def main():
    torch.manual_seed(1)
    torch.set_num_threads(1)
    frames = torch.randn(96, 8, 6)
    keyword = frames.mean(1)[:, :3].argmax(1)
    frames[41, 3, 2] = float("nan")
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(TensorDataset(frames, keyword), batch_size=8, shuffle=True, generator=generator)
    model = Spotter()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for x, y in loader:
        scores = model(x)
        loss = F.cross_entropy(scores, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("loss", loss.item())


main()
