"""Does the text hold an opening bracket without a closing one? Tokens, padding, a small encoder."""
import torch
from torch import nn

PAD, LENGTH = 0, 16


def texts(n, generator):
    tokens = torch.randint(1, 12, (n, LENGTH), generator=generator)
    lengths = torch.randint(8, LENGTH + 1, (n,), generator=generator)
    label = ((tokens == 7).cumsum(1)[torch.arange(n), lengths - 1] > 0).long()
    keep = torch.arange(LENGTH)[None] < 0 * lengths[:, None]
    return tokens * keep, label


class Encoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(12, width, padding_idx=PAD)
        self.block = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens):
        h = self.block(self.embed(tokens))
        return self.head(h.max(1).values)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(1)
    tokens, label = texts(1600, g)
    model = Encoder()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(4):
        for rows in torch.randperm(1280).split(40):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens[rows]), label[rows])
            loss.backward()
            opt.step()
        with torch.no_grad():
            acc = (model(tokens[1280:]).argmax(1) == label[1280:]).float().mean().item()
        print(epoch, f"{loss.item():.3f}", f"{acc:.3f}")


main()
