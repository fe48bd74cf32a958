"""Fine-tune a trained classifier on a new, noisier scanner with a learning rate of 1e-5."""
from pathlib import Path

import numpy as np
import torch
from torch import nn


class Trainer:
    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer
        self.criterion = nn.CrossEntropyLoss()

    def fit(self, x, y, epochs, batch_size=32):
        for epoch in range(epochs):
            self.model.train()
            total = 0.0
            for rows in torch.randperm(len(x)).split(batch_size):
                self.optimizer.zero_grad()
                loss = self.criterion(self.model(x[rows]), y[rows])
                loss.backward()
                self.optimizer.step()
                total += loss.item() * len(rows)
            print(f"   epoch {epoch} mean loss {total / len(x):.4f}")

    @torch.no_grad()
    def accuracy(self, x, y):
        self.model.eval()
        return (self.model(x).argmax(1) == y).float().mean().item()


if __name__ == "__main__":
    torch.manual_seed(8)
    torch.set_num_threads(1)
    npz = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    clean = torch.from_numpy(npz["images"]).float().flatten(1) / 16
    labels = torch.from_numpy(npz["labels"]).long()
    shuffle = torch.randperm(len(clean))
    clean, labels = clean[shuffle], labels[shuffle]
    scanner = clean + 0.05 * torch.randn_like(clean)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    print("pretraining")
    pre = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    pre.fit(clean[:900], labels[:900], epochs=12)
    print("before fine-tuning", pre.accuracy(scanner[1400:], labels[1400:]))

    print("fine-tuning")
    fine = Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-5))
    fine.fit(scanner[900:1400], labels[900:1400], epochs=12)
    print(f"final val_acc {fine.accuracy(scanner[1400:], labels[1400:]):.3f}")
