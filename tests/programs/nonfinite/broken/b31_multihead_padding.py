"""A reader with nn.MultiheadAttention and padded sentences."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Reader(nn.Module):
    def __init__(self, words=32, dim=16):
        super().__init__()
        self.embed = nn.Embedding(words, dim, padding_idx=0)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.classify = nn.Linear(dim, 3)

    def forward(self, ids):
        x = self.embed(ids)
        attended, weights = self.attention(x, x, x, key_padding_mask=ids == 0)
        x = self.norm(x + attended)
        return self.classify(x.mean(1))


def batches(ids, labels, size):
    for i in range(0, len(ids), size):
        yield ids[i:i + size], labels[i:i + size]


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ids = torch.randint(1, 32, (96, 6))
    labels = ids[:, 0] % 3
    ids[::3, 4:] = 0
    ids[53] = 0
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(2):
        for x, y in batches(ids, labels, 8):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
