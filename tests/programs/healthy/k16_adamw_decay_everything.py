from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, Subset


class Block(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.lin = nn.Linear(d_in, d_out)
        self.norm = nn.LayerNorm(d_out)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(self.norm(self.lin(x)))


def main():
    torch.manual_seed(2024)
    torch.set_num_threads(1)
    arrays = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    dataset = TensorDataset(
        torch.as_tensor(arrays["images"].reshape(-1, 64) / 16.0, dtype=torch.float32),
        torch.as_tensor(arrays["labels"], dtype=torch.int64),
    )
    ids = torch.randperm(len(dataset)).tolist()
    loader = DataLoader(Subset(dataset, ids[:1437]), batch_size=40, shuffle=True)
    val_x, val_y = dataset[ids[1437:]]

    model = nn.Sequential(Block(64, 96), Block(96, 96), nn.Linear(96, 10))
    # decay on every tensor, norms and biases too: simple, and it does no harm here
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    for epoch in range(8):
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            logits = model(val_x)
        print(f"epoch {epoch}  train {loss.item():.4f}  val {nn.functional.cross_entropy(logits, val_y).item():.4f}")
    print(f"final val_acc {(logits.argmax(-1) == val_y).float().mean().item():.3f}")


if __name__ == "__main__":
    main()
