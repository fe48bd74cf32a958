"""Speech-like CTC: utterance 3 of batch 6 is shorter than its transcript."""
import torch
from torch import nn


class Acoustic(nn.Module):
    def __init__(self, feats=10, vocab=6):
        super().__init__()
        self.lstm = nn.LSTM(feats, 24, batch_first=True, bidirectional=True)
        self.out = nn.Linear(48, vocab)

    def forward(self, x):
        y, _ = self.lstm(x)
        return self.out(y).log_softmax(-1)


def batches(count=12, size=8):
    g = torch.Generator().manual_seed(2)
    for i in range(count):
        frames = torch.randn(size, 20, 10, generator=g)
        in_len = torch.full((size,), 20)
        text_len = torch.randint(3, 7, (size,), generator=g)
        if i == 6:
            in_len[3] = 2
            text_len[3] = 5
        text = torch.randint(1, 6, (size, 7), generator=g)
        yield frames, in_len, text, text_len


def train(model, epochs):
    ctc = nn.CTCLoss(blank=0)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        total = 0.0
        for frames, in_len, text, text_len in batches():
            logp = model(frames).transpose(0, 1)
            loss = ctc(logp, text, in_len, text_len)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            total += loss.item()
        print("epoch", epoch, total)


torch.manual_seed(0)
train(Acoustic(), 2)
