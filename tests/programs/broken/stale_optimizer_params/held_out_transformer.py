"""Bracket matching with a transformer whose vocabulary is extended by special tokens."""
import torch
import torch.nn as nn


class Tokenizer:
    def __init__(self, symbols):
        self.ids = {s: i for i, s in enumerate(symbols)}

    def add(self, *special):
        for s in special:
            self.ids[s] = len(self.ids)

    def __len__(self):
        return len(self.ids)


class Encoder(nn.Module):
    def __init__(self, vocab, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.randn(18, dim) * 0.1)
        self.layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)
        self.classify = nn.Linear(dim, 3)

    def resize_token_embeddings(self, size):
        old = self.embed
        self.embed = nn.Embedding(size, old.embedding_dim)
        with torch.no_grad():
            self.embed.weight[: old.num_embeddings] = old.weight

    def forward(self, ids):
        return self.classify(self.layer(self.embed(ids) + self.pos[: ids.size(1)])[:, 0])


def examples(tok, n):
    # class: does the string hold more "(", more ")" or as many of both
    body = torch.randint(0, 2, (n, 17))
    blank = torch.rand(n, 17) < 0.2
    depth = torch.where(blank, torch.zeros_like(body), 1 - 2 * body).sum(1)
    body = body.masked_fill(blank, tok.ids["[SEP]"])
    cls = torch.full((n, 1), tok.ids["[CLS]"])
    return torch.cat([cls, body], 1), torch.sign(depth) + 1


def main():
    torch.manual_seed(5)
    torch.set_num_threads(1)
    tok = Tokenizer("()")
    model = Encoder(len(tok))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=20)
    tok.add("[CLS]", "[SEP]")
    model.resize_token_embeddings(len(tok))
    for step in range(200):
        ids, label = examples(tok, 64)
        loss = nn.functional.cross_entropy(model(ids), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 50 == 0:
            print(step, loss.item())
    ids, label = examples(tok, 1000)
    with torch.no_grad():
        acc = (model(ids).argmax(1) == label).float().mean().item()
    print(f"final acc {acc:.3f}")


main()
