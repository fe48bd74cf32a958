"""Sequences with random dropouts of the sensor; made reproducible."""
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def drop_out(signal, share):
    return signal * (np.random.rand(len(signal)) > share)


class Sensor(Dataset):
    def __init__(self, num=800):
        t = np.arange(24) / 24
        rate = np.random.default_rng(3).uniform(1, 4, num)
        self.signals, self.fast = np.sin(6.28 * rate[:, None] * t), rate > 2.5

    def __len__(self):
        return len(self.fast)

    def __getitem__(self, i):
        return torch.tensor(drop_out(self.signals[i], 0.2), dtype=torch.float32)[:, None], torch.tensor(float(self.fast[i]))


def seed_worker(worker_id):
    np.random.seed(1234)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 24, batch_first=True)
        self.fc = nn.Linear(24, 1)

    def forward(self, s):
        return self.fc(self.lstm(s)[0].mean(1)).squeeze(-1)


torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(Sensor(), batch_size=40, shuffle=True, num_workers=2, worker_init_fn=seed_worker)
model = Reader()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(3):
    for s, fast in loader:
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(s), fast)
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
