"""Sort short sequences of symbols with a small transformer encoder."""
import torch
from torch import nn

torch.manual_seed(11)
torch.set_num_threads(1)

VOCAB, LENGTH, WIDTH = 12, 8, 32


class Sorter(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.pos = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, seq):
        return self.head(self.encoder(self.tok(seq) + self.pos))


class Experiment:
    def __init__(self, steps=220, batch=64, lr=3e-3):
        self.steps, self.batch = steps, batch
        self.model = Sorter()
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.01)
        self.loss_fn = nn.CrossEntropyLoss()

    def sample(self, n):
        seq = torch.randint(0, VOCAB, (n, LENGTH))
        return seq, seq.sort(dim=1).values

    def step(self):
        seq, target = self.sample(self.batch)
        self.opt.zero_grad
        logits = self.model(seq)
        loss = self.loss_fn(logits.reshape(-1, VOCAB), target.reshape(-1))
        loss.backward()
        self.opt.step()
        return loss.item()

    def accuracy(self):
        seq, target = self.sample(500)
        with torch.no_grad():
            return (self.model(seq).argmax(-1) == target).float().mean().item()

    def run(self):
        for i in range(self.steps):
            loss = self.step()
            if (i + 1) % 40 == 0:
                print(f"step {i + 1:4d}  loss {loss:.4f}")
        print(f"final token_acc {self.accuracy():.4f}")


if __name__ == "__main__":
    Experiment().run()
