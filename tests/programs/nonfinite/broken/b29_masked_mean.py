"""Sentence vectors: the mean of the word vectors that are not padding."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class MeanPool(nn.Module):
    def forward(self, words, mask):
        mask = mask.unsqueeze(-1).float()
        total = (words * mask).sum(1)
        return total / mask.sum(1)


class Sentiment(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16, padding_idx=0)
        self.rnn = nn.GRU(16, 16, batch_first=True)
        self.pool = MeanPool()
        self.out = nn.Linear(16, 2)

    def forward(self, ids):
        h, _ = self.rnn(self.embed(ids))
        return self.out(self.pool(h, ids != 0))


def main():
    torch.set_num_threads(1)
    torch.manual_seed(12)
    ids = torch.randint(1, 40, (128, 9))
    sentiment = (ids[:, 0] > 20).long()
    ids[:, 6:] *= torch.randint(0, 2, (128, 3))
    ids[45] = 0
    ids[47] = 0
    model = Sentiment()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for i in range(16):
        logits = model(ids[i * 8:i * 8 + 8])
        loss = F.cross_entropy(logits, sentiment[i * 8:i * 8 + 8])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(loss.item())


main()
