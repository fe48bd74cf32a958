import torch
from torch import nn


class Trainer:
    """Fits a mixture of sines and keeps a history for plots."""

    def __init__(self):
        torch.manual_seed(5)
        torch.set_num_threads(1)
        self.model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.history = {"loss": [], "lr": []}

    def batch(self):
        x = torch.rand(64, 4) * 4 - 2
        return x, torch.sin(x).sum(dim=1, keepdim=True)

    def step(self):
        x, y = self.batch()
        loss = (self.model(x) - y).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.history["loss"].append(loss)
        self.history["lr"].append(self.optimizer.param_groups[0]["lr"])

    def fit(self, num_steps):
        for _ in range(num_steps):
            self.step()


trainer = Trainer()
trainer.fit(200)
print(f"{trainer.history['loss'][0].item():.3f} -> {trainer.history['loss'][-1].item():.3f}")
