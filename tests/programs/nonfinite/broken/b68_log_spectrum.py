"""Classify sounds from their log-spectrum."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class LogSpectrum(nn.Module):
    def forward(self, wave):
        power = torch.fft.rfft(wave).abs() ** 2
        return power.log()


class SoundNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.frontend = LogSpectrum()
        self.conv = nn.Conv1d(1, 6, 3, padding=1)
        self.out = nn.Linear(6 * 17, 2)

    def forward(self, wave):
        spectrum = self.frontend(wave).unsqueeze(1)
        return self.out(F.relu(self.conv(spectrum)).flatten(1))


torch.manual_seed(0)
torch.set_num_threads(1)
t = torch.arange(32) / 32
pitch = torch.randint(2, 6, (88, 1))
waves = torch.sin(2 * math.pi * pitch * t) + 0.1 * torch.randn(88, 32)
high = (pitch.squeeze(1) > 3).long()
waves[49] = 0  # silence
model = SoundNet()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for k in range(11):
    rows = slice(8 * k, 8 * k + 8)
    loss = F.cross_entropy(model(waves[rows]), high[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item())
