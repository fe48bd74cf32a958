"""Remember the first symbol of a sequence to its end: an LSTM whose forget gates start wide open."""
import torch
from torch import nn


class Memory(nn.Module):
    def __init__(self, symbols, hidden=32, forget_bias=5.0):
        super().__init__()
        self.emb = nn.Embedding(symbols, 12)
        self.lstm = nn.LSTM(12, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, symbols)
        with torch.no_grad():
            # gate order is input, forget, cell, output
            self.lstm.bias_ih_l0[hidden:2 * hidden] = forget_bias
            self.lstm.bias_hh_l0[hidden:2 * hidden] = 0.0

    def forward(self, seq):
        out, _ = self.lstm(self.emb(seq))
        return self.fc(out[:, -1])


def batch(n, length, symbols):
    seq = torch.randint(symbols, (n, length))
    return seq, seq[:, 0]


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    S, T = 6, 25
    model = Memory(S)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()
    for step in range(1, 221):
        seq, target = batch(48, T, S)
        loss = criterion(model(seq), target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 44 == 0:
            print(f"step {step}: {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        seq, target = batch(1000, T, S)
        acc = (model(seq).argmax(1) == target).float().mean().item()
    print(f"final recall_acc {acc:.3f}")
