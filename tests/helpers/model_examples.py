"""Small models of every kind that people train, each with a loss on one random batch. Batches come from torch's global generator, so that a
tool which disturbs it shows in the very next loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

Loss = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Program:
    """A model and how one batch becomes a loss. `repeats` says that the same batch twice gives the same loss, as LBFGS needs it."""

    name: str
    build: Callable[[], nn.Module]
    loss: Loss
    repeats: bool = True

    def __str__(self) -> str:
        return self.name


def _regression(*shape: int, outputs: int = 1) -> Loss:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(*shape)
        return F.mse_loss(model(x).float(), x.flatten(1).sum(1, keepdim=True).expand(-1, outputs).float())

    return loss


def _tokens(model: nn.Module) -> Tensor:
    x = torch.randint(0, 12, (4, 5))
    return F.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Flatten(), nn.Linear(4 * 16, 1))


class Residual(nn.Module):
    """ReLU in place and `x += y`: what full backward hooks cannot bear."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.norm, self.relu, self.head = nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.relu(self.norm(self.first(x))))
        y += x
        return self.head(self.relu(y).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell, self.head = cell(6, 5, num_layers=2, batch_first=True), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attend(x, x, x)[0].mean(1))


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(12, 6), nn.LayerNorm(6), nn.Linear(6, 12))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(12, 6), nn.Linear(6, 6), nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(x))))


class Shared(nn.Module):
    """One module under two names, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(6, 6), nn.Linear(6, 1)
        self.again = self.block

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.relu(self.block(x))
        return self.head(x)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor | list[Tensor]]:
        return {"left": self.left(x), "rest": [self.right(x)]}


class DictOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.halves = Halves()

    def forward(self, x: Tensor) -> Tensor:
        both = self.halves(x)
        return both["left"] + both["rest"][0]


@dataclass
class Pair:
    mean: Tensor
    spread: Tensor | None = None


class PairHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 1))

    def forward(self, x: Tensor) -> Pair:
        return Pair(x @ self.weight)


class DataclassOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), PairHead()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).mean


def parametrized() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(6, 8)), nn.GELU(), nn.Linear(8, 1))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.door = nn.Linear(6, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 8))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, self.door(x), use_reentrant=self.reentrant))


def autoencoder() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3), nn.Sigmoid(), nn.Linear(3, 6))


def _reconstruction(model: nn.Module) -> Tensor:
    x = torch.randn(5, 6)
    return F.mse_loss(model(x).float(), x.float())


PROGRAMS = (
    Program("mlp", mlp, _regression(5, 6)),
    Program("conv", conv, _regression(4, 3, 6, 6), repeats=False),
    Program("residual", Residual, _regression(4, 3, 4, 4), repeats=False),
    Program("lstm", lambda: Recurrent(nn.LSTM), _regression(4, 3, 6)),
    Program("gru", lambda: Recurrent(nn.GRU), _regression(4, 3, 6)),
    Program("transformer", Encoder, _tokens, repeats=False),
    Program("attention", Attention, _regression(4, 3, 6)),
    Program("embedding", embedding, _tokens),
    Program("tied", Tied, _tokens),
    Program("shared", Shared, _regression(5, 6)),
    Program("dict output", DictOutput, _regression(5, 6)),
    Program("dataclass output", DataclassOutput, _regression(5, 6)),
    Program("parametrized", parametrized, _regression(5, 6)),
    Program("checkpointed", lambda: Checkpointed(False), _regression(5, 6), repeats=False),
    Program("checkpointed reentrant", lambda: Checkpointed(True), _regression(5, 6), repeats=False),
    Program("autoencoder", autoencoder, _reconstruction),
)
BY_NAME = {program.name: program for program in PROGRAMS}


class Gan(nn.Module):
    """Two models in one container; they are called, and trained, apart."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.judge = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))


def gan_step(maker: nn.Module, judge: nn.Module, of_maker: torch.optim.Optimizer, of_judge: torch.optim.Optimizer) -> float:
    real, fake = torch.randn(5, 2) + 2, maker(torch.randn(5, 4))
    of_judge.zero_grad()
    loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
    loss.backward()
    of_judge.step()
    of_maker.zero_grad()
    F.softplus(-judge(fake)).mean().backward()
    of_maker.step()
    return loss.item()
