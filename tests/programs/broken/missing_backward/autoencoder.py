from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ConvAutoencoder(nn.Module):
    """8x8 -> 16 numbers -> 8x8"""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(64, 16),
        )
        self.decoder = nn.Sequential(
            nn.Linear(16, 64), nn.ReLU(), nn.Unflatten(1, (16, 2, 2)),
            nn.ConvTranspose2d(16, 8, 2, stride=2), nn.ReLU(),
            nn.ConvTranspose2d(8, 1, 2, stride=2), nn.Sigmoid(),
        )

    def forward(self, x):
        return self.decoder(self.encoder(x))


class Trainer:
    def __init__(self, model, loader, lr=3e-3):
        self.model = model
        self.loader = loader
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.criterion = nn.MSELoss()
        self.history = []

    def train_step(self, images):
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(images), images)
        loss.backward
        self.optimizer.step()
        return loss.item()

    def fit(self, epochs):
        for epoch in range(epochs):
            losses = [self.train_step(images) for (images,) in self.loader]
            self.history.append(sum(losses) / len(losses))
            print(f"epoch {epoch + 1}: mse {self.history[-1]:.5f}")


if __name__ == "__main__":
    torch.manual_seed(2)
    torch.set_num_threads(1)
    pixels = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")["images"]
    images = torch.from_numpy(pixels).float().unsqueeze(1) / 16
    trainer = Trainer(ConvAutoencoder(), DataLoader(TensorDataset(images), batch_size=64, shuffle=True))
    trainer.fit(5)
    print(f"final mse {trainer.history[-1]:.5f}")
