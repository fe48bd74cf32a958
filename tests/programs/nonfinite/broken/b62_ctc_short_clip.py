"""Handwriting recognition with CTC."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Recogniser(nn.Module):
    def __init__(self, letters=5):
        super().__init__()
        self.rnn = nn.LSTM(3, 16, bidirectional=True)
        self.out = nn.Linear(32, letters + 1)

    def forward(self, strokes):
        h, _ = self.rnn(strokes)
        return self.out(h).log_softmax(-1)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    strokes = torch.randn(10, 48, 3)
    words = torch.randint(1, 6, (48, 4))
    frames = torch.full((48,), 10)
    frames[29] = 3  # the pen was lifted early
    letters = torch.full((48,), 4)
    model = Recogniser()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(6):
        b = slice(8 * step, 8 * step + 8)
        log_p = model(strokes[:, b])
        loss = F.ctc_loss(log_p, words[b], frames[b], letters[b])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


main()
