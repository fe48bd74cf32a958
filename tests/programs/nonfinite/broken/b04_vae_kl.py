"""A variational autoencoder on handwritten digits."""
import pathlib

import numpy as np
import torch
from torch import nn, optim
from torch.nn import functional as F


class VAE(nn.Module):
    def __init__(self, hidden=48, latent=4):
        super().__init__()
        self.fc1 = nn.Linear(64, hidden)
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.fc3 = nn.Linear(latent, hidden)
        self.fc4 = nn.Linear(hidden, 64)

    def encode(self, x):
        h = torch.relu(self.fc1(x))
        return self.mu(h), self.logvar(h)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + std * torch.randn_like(std)

    def decode(self, z):
        return torch.sigmoid(self.fc4(torch.tanh(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x)
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def elbo(reconstruction, x, mu, logvar):
    rec = F.mse_loss(reconstruction, x, reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return (rec + kld) / len(x)


def train(model, data, epochs=2):
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for i in range(0, len(data), 20):
            x = data[i:i + 20]
            optimizer.zero_grad()
            reconstruction, mu, logvar = model(x)
            loss = elbo(reconstruction, x, mu, logvar)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(11)
    images = np.load(pathlib.Path(__file__).parents[2] / "data" / "digits.npz")["images"][:240]
    data = torch.tensor(images, dtype=torch.float32).view(-1, 64) / 16
    data[87] = data[87] * 900
    model = VAE()
    with torch.no_grad():
        model.logvar.weight[0].fill_(0.02)
    train(model, data)
