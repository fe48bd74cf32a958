"""Seq2seq: read digits, write them in ascending order. Encoder and decoder are separate modules."""
import torch
import torch.nn as nn

torch.manual_seed(3)
torch.set_num_threads(1)
DIGITS, LEN, HID = 6, 5, 48


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(DIGITS, 16)
        self.lstm = nn.LSTM(16, HID, batch_first=True)

    def forward(self, src):
        return self.lstm(self.embedding(src))[1]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(DIGITS + 1, 16)
        self.lstm = nn.LSTM(16, HID, batch_first=True)
        self.out = nn.Linear(HID, DIGITS)

    def forward(self, tgt_in, state):
        h, state = self.lstm(self.embedding(tgt_in), state)
        return self.out(h), state


encoder = Encoder()
decoder = Decoder()
optimizer = torch.optim.Adam(decoder.parameters(), lr=5e-3)
criterion = nn.CrossEntropyLoss()

for step in range(300):
    src = torch.randint(0, DIGITS, (64, LEN))
    tgt = src.sort(1)[0]
    start = torch.full((64, 1), DIGITS)
    logits, _ = decoder(torch.cat([start, tgt[:, :-1]], 1), encoder(src))
    loss = criterion(logits.reshape(-1, DIGITS), tgt.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(decoder.parameters(), 5.0)
    optimizer.step()
    if step % 60 == 0:
        print(f"step {step:3d} loss {loss.item():.3f}")

print(f"final loss {loss.item():.4f}")
