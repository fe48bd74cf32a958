"""A linear autoencoder on digits: it should find the same subspace as PCA."""
from pathlib import Path

import numpy as np
import torch
from torch import nn


class LinearAE(nn.Module):
    def __init__(self, dim, code):
        super().__init__()
        self.encode = nn.Linear(dim, code)
        self.decode = nn.Linear(code, dim)

    def forward(self, x):
        return self.decode(self.encode(x))


def pca_error(x, k):
    centered = x - x.mean(0)
    _, s, _ = torch.linalg.svd(centered, full_matrices=False)
    return (s[k:] ** 2).sum().item() / x.numel()


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    pixels = np.load(Path(__file__).parent.parent / "data" / "digits.npz")["images"]
    x = torch.from_numpy(pixels).float().flatten(1) / 16
    model = LinearAE(64, 8)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(18):
        for batch in x[torch.randperm(len(x))].split(64):
            loss = ((model(batch) - batch) ** 2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        if epoch % 3 == 2:
            print(f"epoch {epoch + 1}: {loss.item():.5f}")
    with torch.no_grad():
        err = ((model(x) - x) ** 2).mean().item()
    print(f"PCA with 8 components {pca_error(x, 8):.5f}, variance {x.var(0).mean().item():.5f}")
    print(f"final mse {err:.5f}")


if __name__ == "__main__":
    main()
