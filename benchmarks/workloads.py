"""The three trainings that Sonde's cost is measured on, their budgets, and when a budget holds.

Each is an ordinary loop: clear the gradients, forward, loss, backward, Adam. The data is created once, so that a step is the training
alone. The labels are permuted from step to step: a batch that is learnt by heart makes the loss spike at times, and Sonde then replays
that step, which is not what is measured here.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

SEED = 0
BATCH = 32
NUM_TOKENS = 8, 128  # batch and length of the transformer's input
VOCABULARY = 1000
NUM_LABELLINGS = 64
TOLERANCE = 0.01  # a budget holds when the median ratio is at most the budget plus this
MIN_ROUNDS = 20  # interleaved rounds, of each of NUM_RUNS runs; with fewer, nothing is judged
NUM_RUNS = 2
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


def prepare(num_threads: int) -> None:
    """For the whole process. A batch that is learnt by heart leaves subnormal numbers, which the processor computes slowly: the training
    that has run for longer then seems to cost more, watched or not (5 to 8 % on the MLP after 1,500 steps). Here they are flushed to
    zero."""
    torch.set_num_threads(num_threads)
    torch.set_flush_denormal(True)
    _keep_memory()


def _keep_memory() -> None:
    """What happens to be at the top of the heap decides how much of it glibc returns to the system and requests again at every step: on the
    conv net 0 to 70 MB, up to a sixth of its time, watched or not. Here glibc returns nothing."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_TRIM_THRESHOLD, -1)
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)  # more it does not accept; larger than every tensor here


def is_over_budget(ratio: float, budget: float) -> bool:
    """Whether a median ratio of CPU time exceeds its budget by more than the noise that is allowed for."""
    return ratio > budget + TOLERANCE


@dataclass(frozen=True, slots=True)
class Workload:
    """A training to be repeated: `make()` builds the model, its loss and its batch anew, the same each time."""

    name: str
    title: str
    make: Callable[[], tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]]
    chunk: int  # steps of a turn that are timed: enough for the default to observe a few of them
    num_in_slice: int  # of them, with bare ones between: the speed of a shared machine changes from step to step, by tens of percent
    num_warm: int  # steps at the start of a slice that are not timed: where a step is long, the caches are cold at its start anyway
    every_budget: float  # ratio to bare that is promised when everything is observed at every step
    default_budget: float  # and with the defaults
    framework_budget: float  # and with the defaults inside of Lightning and the Trainer of transformers


class Training:
    """One model being trained, with a hook for what a debugger would make the user write into the loop."""

    def __init__(self, workload: Workload) -> None:
        torch.manual_seed(SEED)
        self.model, self.criterion, self.inputs, targets = workload.make()
        self._labellings = [targets[torch.randperm(len(targets))] for _ in range(NUM_LABELLINGS)]
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.num_steps = self._num_losses = 0
        self.before_update: Callable[[int], Any] | None = None  # gradients are there, the parameters are not changed yet

    def loss(self, outputs: torch.Tensor) -> torch.Tensor:
        self._num_losses += 1
        value: torch.Tensor = self.criterion(outputs.flatten(0, -2), self._labellings[self._num_losses % NUM_LABELLINGS])
        return value

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(self.model(self.inputs))
        loss.backward()
        if self.before_update is not None:
            self.before_update(self.num_steps)
        self.optimizer.step()
        self.num_steps += 1


def _mlp() -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    layers: list[nn.Module] = []
    for _ in range(20):
        layers += [nn.Linear(64, 64), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    return model, nn.CrossEntropyLoss(), torch.randn(BATCH, 64), torch.randint(10, (BATCH,))


def _conv() -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    layers: list[nn.Module] = []
    channels = 3
    for width, stride in ((32, 1), (64, 1), (64, 2), (128, 1), (128, 2), (256, 1)):
        layers += [nn.Conv2d(channels, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return model, nn.CrossEntropyLoss(), torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))


class _Transformer(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(NUM_TOKENS[1], width)
        layer = nn.TransformerEncoderLayer(width, nhead=8, dim_feedforward=4 * width, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1])
        logits: torch.Tensor = self.head(self.layers(self.tokens(tokens) + self.positions(places)))
        return logits


def _transformer() -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, NUM_TOKENS)
    return _Transformer(), nn.CrossEntropyLoss(), tokens, tokens.roll(-1, 1).flatten()


WORKLOADS = (
    Workload("mlp", "20-layer MLP, 64 wide, batch 32", _mlp, 240, 2, 1, 1.35, 1.07, 1.10),
    Workload("conv", "7-layer conv net, 32x32 images, batch 32", _conv, 12, 1, 0, 1.06, 1.02, 1.02),
    Workload("transformer", "6-layer transformer, width 256, 8x128 tokens", _transformer, 12, 1, 0, 1.05, 1.02, 1.02),
)
