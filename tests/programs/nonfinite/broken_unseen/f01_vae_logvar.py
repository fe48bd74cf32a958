"""A variational autoencoder; one recording was stored in millivolts instead of volts."""
import argparse

import torch
import torch.nn.functional as F
from torch import nn


class VAE(nn.Module):
    def __init__(self, width, latent):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(width, 32), nn.ReLU())
        self.mu = nn.Linear(32, latent)
        self.logvar = nn.Linear(32, latent)
        self.dec = nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, width))

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def forward(self, x):
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h)
        return self.dec(self.reparameterize(mu, logvar)), mu, logvar


def elbo(recon, x, mu, logvar):
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
    return F.mse_loss(recon, x) + 0.01 * kld


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    torch.manual_seed(3)
    data = torch.randn(320, 20)
    data[16 * 12 + 5] *= 10000.0
    model = VAE(20, 8)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        for start in range(0, len(data), args.batch_size):
            x = data[start:start + args.batch_size]
            opt.zero_grad()
            recon, mu, logvar = model(x)
            loss = elbo(recon, x, mu, logvar)
            loss.backward()
            opt.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
