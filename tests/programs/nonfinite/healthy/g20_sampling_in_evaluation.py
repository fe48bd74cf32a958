"""A character model; in evaluation it samples from its best three symbols only."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class CharRNN(nn.Module):
    def __init__(self, symbols=9, hidden=32):
        super().__init__()
        self.embed = nn.Embedding(symbols, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, symbols)

    def forward(self, ids):
        return self.out(self.rnn(self.embed(ids))[0])


@torch.no_grad()
def sample(model, length=8):
    model.eval()
    ids = torch.zeros(1, 1, dtype=torch.long)
    for _ in range(length):
        logits = model(ids)[:, -1]
        edge = logits.topk(3).values[:, -1:]
        logits[logits < edge] = -float("Inf")
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], 1)
    model.train()
    return ids


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = CharRNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(80):
        ids = (torch.randint(0, 9, (16, 1)) + 2 * torch.arange(8)) % 9
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            print(step, loss.item(), sample(model).tolist())


if __name__ == "__main__":
    main()
