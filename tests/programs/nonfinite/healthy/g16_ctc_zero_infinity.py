"""CTC with zero_infinity: clips that are too short for their word are dropped."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Recogniser(nn.Module):
    def __init__(self, letters=4):
        super().__init__()
        self.rnn = nn.GRU(letters, 24)
        self.out = nn.Linear(24, letters + 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0]).log_softmax(-1)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Recogniser()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CTCLoss(zero_infinity=True)
    for step in range(100):
        words = torch.randint(1, 5, (12, 3))
        x = F.one_hot(words.repeat_interleave(3, dim=1).t() - 1, 4).float()
        frames = torch.full((12,), 9)
        frames[0] = 2
        loss = criterion(model(x), words, frames, torch.full((12,), 3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("final loss", loss.item())


main()
