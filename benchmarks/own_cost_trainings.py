"""Trainings of 0.1 to 500 ms a step, which `own_cost.py` runs with and without Sonde: python benchmarks/own_cost_trainings.py NAME STEPS

Prints the CPU milliseconds of the loop per step. Nothing here knows of Sonde.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from time import process_time

import torch
from torch import nn
from torch.nn import functional as F


def mlp(num_steps: int) -> None:
    inputs = torch.randn(64, 32, 16)
    labels = (inputs @ torch.randn(16, 4)).argmax(-1)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(num_steps):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[step % 64]), labels[step % 64]).backward()
        optimizer.step()


def gan(num_steps: int) -> None:
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    discriminator = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.999)) for model in (generator, discriminator)]
    ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)
    for _ in range(num_steps):
        angle = torch.rand(32) * 6.2832
        real = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(32, 2)
        fake = generator(torch.randn(32, 8))
        optimizers[1].zero_grad()
        real_loss = F.binary_cross_entropy_with_logits(discriminator(real), ones)
        (real_loss + F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        F.binary_cross_entropy_with_logits(discriminator(fake), ones).backward()
        optimizers[0].step()


def move_cart(state: list[float], action: int) -> list[float]:
    """One hundredth of a second of a pole on a cart."""
    x, speed, angle, turn = state
    push = ((10.0 if action else -10.0) + 0.05 * turn * turn * math.sin(angle)) / 1.1
    turning = (9.8 * math.sin(angle) - math.cos(angle) * push) / (0.5 * (4.0 / 3.0 - 0.1 * math.cos(angle) ** 2 / 1.1))
    return [x + 0.02 * speed, speed + 0.02 * (push - 0.05 * turning * math.cos(angle) / 1.1), angle + 0.02 * turn, turn + 0.02 * turning]


def reinforce(num_steps: int) -> None:
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for _ in range(num_steps):
        state, log_probabilities = [random.uniform(-0.05, 0.05) for _ in range(4)], []
        while abs(state[0]) < 2.4 and abs(state[2]) < 0.21 and len(log_probabilities) < 60:
            choice = torch.distributions.Categorical(logits=policy(torch.tensor(state)))
            action = choice.sample()
            state = move_cart(state, int(action))
            log_probabilities.append(choice.log_prob(action))
        returns = torch.arange(len(log_probabilities), 0, -1.0)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        optimizer.zero_grad()
        (-(torch.stack(log_probabilities) * returns).sum()).backward()
        optimizer.step()


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 48, num_layers=2, batch_first=True)
        self.head = nn.Linear(48, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


def lstm(num_steps: int) -> None:
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(num_steps):
        wave = torch.sin(0.3 * torch.arange(41.0) + torch.rand(40, 1) * 6.28).unsqueeze(-1) + 0.02 * torch.randn(40, 41, 1)
        optimizer.zero_grad()
        F.mse_loss(model(wave[:, :-1]), wave[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def cnn(num_steps: int) -> None:
    labels = torch.randint(0, 10, (1024,))
    images = torch.randn(1024, 1, 28, 28) + labels.view(-1, 1, 1, 1) * 0.2
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=32, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 7 * 7, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(num_steps // 32):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


class LanguageModel(nn.Module):
    def __init__(self, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.encoder(x, mask=self.mask, is_causal=True)))


def transformer(num_steps: int, width: int = 128, depth: int = 4, length: int = 64, batch: int = 16) -> None:
    data = (torch.arange(2000).repeat(batch, 1) * 7 + torch.randint(0, 3, (batch, 2000))) % 256
    model = LanguageModel(width, depth, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    for _ in range(num_steps):
        start = int(torch.randint(0, 2000 - length - 1, (1,)))
        logits = model(data[:, start : start + length])
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), data[:, start + 1 : start + length + 1].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()


def large_transformer(num_steps: int) -> None:
    transformer(num_steps, width=256, depth=6, length=96)


TRAININGS: dict[str, tuple[Callable[[int], None], int]] = {  # with the number of steps that takes a few seconds
    "mlp": (mlp, 10_000),
    "gan": (gan, 4_000),
    "reinforce": (reinforce, 500),
    "lstm": (lstm, 500),
    "cnn": (cnn, 640),
    "transformer": (transformer, 40),
    "large_transformer": (large_transformer, 10),
}

if __name__ == "__main__":
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(1)
    name, num_steps = sys.argv[1], int(sys.argv[2])
    began = process_time()
    TRAININGS[name][0](num_steps)
    print(1e3 * (process_time() - began) / num_steps)
