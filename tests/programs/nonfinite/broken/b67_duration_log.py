"""Predict log-durations of phonemes with a GRU."""
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class DurationModel(nn.Module):
    def __init__(self, phonemes=30, hidden=16):
        super().__init__()
        self.embed = nn.Embedding(phonemes, hidden)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, phonemes):
        h, _ = self.gru(self.embed(phonemes))
        return self.out(h).squeeze(-1)


def loop(loader, model, optimizer):
    for phonemes, frames in loader:
        predicted = model(phonemes)
        target = torch.log(frames)
        loss = F.l1_loss(predicted, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    phonemes = torch.randint(0, 30, (96, 7))
    frames = 1 + (phonemes % 9).float()
    frames[50, 6] = 0.0  # the aligner gave it no frame
    loader = DataLoader(TensorDataset(phonemes, frames), batch_size=8)
    model = DurationModel()
    print(loop(loader, model, torch.optim.Adam(model.parameters(), lr=1e-2)))
