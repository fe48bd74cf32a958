"""Packed sequences through a ReLU RNN that is not contractive; one sequence is far longer than the others."""
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.rnn = nn.RNN(8, 8, nonlinearity="relu", batch_first=True)
        self.fc = nn.Linear(8, 1)
        with torch.no_grad():
            self.rnn.weight_hh_l0.copy_(1.8 * torch.eye(8))

    def forward(self, padded, lengths):
        packed = pack_padded_sequence(self.embed(padded), lengths, batch_first=True, enforce_sorted=False)
        _, h = self.rnn(packed)
        return self.fc(torch.tanh(h[-1])).squeeze(1)


def collate(step):
    g = torch.Generator().manual_seed(step)
    lengths = [int(n) for n in torch.randint(3, 9, (6,), generator=g)]
    if step == 12:
        lengths[4] = 190
    seqs = [torch.randn(n, 3, generator=g) for n in lengths]
    target = torch.stack([s.mean() for s in seqs])
    return pad_sequence(seqs, batch_first=True), torch.tensor(lengths), target


def main():
    torch.manual_seed(77)
    model = Tagger()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(18):
        x, lengths, y = collate(step)
        pred = model(x, lengths)
        loss = ((pred - y) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        opt.step()
        if step % 6 == 0:
            print(step, loss.item())


main()
