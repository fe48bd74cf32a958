"""Trainings whose loss is not made in the loop: from a buffer of outputs, in a helper, or in another object.

The bad operation is a logarithm of zero, on the line that ends in `# bad`; in a spike, a target is far off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from guarantees.replay_programs.small_training import BAD_STEP, NUM_STEPS, digest, main, watching


class Policy(nn.Module):
    """After the actor-critic example of pytorch: outputs with their graphs wait in a list for the end of the episode."""

    def __init__(self) -> None:
        super().__init__()
        self.affine, self.drop, self.action, self.value = nn.Linear(4, 16), nn.Dropout(0.1), nn.Linear(16, 2), nn.Linear(16, 1)
        self.saved_actions: list[tuple[Tensor, Tensor]] = []
        self.rewards: list[float] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.drop(F.relu(self.affine(x)))
        return F.softmax(self.action(h), dim=-1), self.value(h)


class PolicyBadInForward(Policy):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.drop(F.relu(self.affine(x)))
        bonus = torch.log((1 + h.sum()) * (x[3] < 50))  # bad
        return F.softmax(self.action(h), dim=-1), self.value(h) + 0.01 * bonus


def select_action(model: Policy, state: Tensor) -> int:
    probabilities, value = model(state)
    chosen = Categorical(probabilities)
    action = chosen.sample()
    model.saved_actions.append((chosen.log_prob(action), value))
    return int(action)


def finish_episode(model: Policy, optimizer: torch.optim.Optimizer, weight: float) -> float:
    total, returns = 0.0, list[float]()
    for reward in model.rewards[::-1]:
        total = reward + 0.9 * total
        returns.insert(0, total)
    policy_losses, value_losses = [], []
    for (log_probability, value), expected in zip(model.saved_actions, torch.tensor(returns)):
        policy_losses.append(-log_probability * (expected - value.item()))
        value_losses.append(F.smooth_l1_loss(value, expected[None]))
    optimizer.zero_grad()
    values = torch.cat([value for _, value in model.saved_actions])
    score = torch.log((1 + values.square()) * weight)  # bad
    loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum() + 0.01 * score.sum()
    loss.backward()
    if loss.isfinite():
        optimizer.step()
    del model.rewards[:]
    del model.saved_actions[:]
    return loss.item()


def actor_critic(folder: Path, incident: str, watched: bool, kind: type[Policy] = Policy) -> Any:
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    losses = []
    with watching(model, optimizer, folder) if watched else contextlib.nullcontext():
        for episode in range(NUM_STEPS):
            is_bad = episode == BAD_STEP
            for moment in range(6):
                state = torch.randn(4)
                if is_bad and incident == "nan" and moment == 3 and kind is PolicyBadInForward:
                    state[3] = 100.0
                action = select_action(model, state)
                model.rewards.append(float(state[action]) * 0.1 + (500.0 if is_bad and incident == "spike" and moment == 3 else 0.0))
            losses.append(finish_episode(model, optimizer, 0.0 if is_bad and incident == "nan" and kind is Policy else 1.0))
    return outcome(model, losses)


def actor_critic_bad_in_forward(folder: Path, incident: str, watched: bool) -> Any:
    return actor_critic(folder, incident, watched, PolicyBadInForward)


# ---- losses of a regression


def regression(
    folder: Path, incident: str, watched: bool, step: Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor, Tensor], float]
) -> Any:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    with watching(model, optimizer, folder) if watched else contextlib.nullcontext():
        for number in range(NUM_STEPS):
            x, weight = torch.randn(8, 4), torch.ones(8, 1)
            y = x.sum(1, keepdim=True)
            if number == BAD_STEP and incident == "nan":
                weight[5] = 0.0
            elif number == BAD_STEP:
                y[5] = 60.0
            losses.append(step(model, optimizer, x, y, weight))
    return outcome(model, losses)


def outcome(model: nn.Module, losses: list[float]) -> Any:
    return {"losses": list(map(repr, losses)), "numbers": digest(model.state_dict().values()), "generator": digest([torch.get_rng_state()])}


def get_loss(y_pred: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    score = torch.log((1 + y_pred.square()) * weight)  # bad
    return F.mse_loss(y_pred, y) - 0.01 * score.mean()


def helper(folder: Path, incident: str, watched: bool) -> Any:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, weight: Tensor) -> float:
        y_pred = model(x)
        loss = get_loss(y_pred, y, weight)
        optimizer.zero_grad()
        loss.backward()
        if loss.isfinite():
            optimizer.step()
        return loss.item()

    return regression(folder, incident, watched, step)


def learn(y_pred: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    score = torch.log((1 + y_pred.square()) * weight)  # bad
    loss = F.mse_loss(y_pred, y) - 0.01 * score.mean()
    loss.backward()
    return loss


def helper_calls_backward(folder: Path, incident: str, watched: bool) -> Any:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, weight: Tensor) -> float:
        optimizer.zero_grad()
        y_pred = model(x)
        loss = learn(y_pred, y, weight)
        if loss.isfinite():
            optimizer.step()
        return loss.item()

    return regression(folder, incident, watched, step)


def predict(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def helper_of_a_helper(folder: Path, incident: str, watched: bool) -> Any:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, weight: Tensor) -> float:
        optimizer.zero_grad()
        loss = learn(predict(model, x), y, weight)
        if loss.isfinite():
            optimizer.step()
        return loss.item()

    return regression(folder, incident, watched, step)


class Criterion:
    def __init__(self) -> None:
        self.num_calls, self.history = 0, list[float]()

    def __call__(self, out: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        self.num_calls += 1
        score = torch.log((1 + out.square()) * weight)  # bad
        self.loss = F.mse_loss(out, y) - 0.01 * score.mean()
        self.history.append(self.loss.item())
        return self.loss


class Trainer:
    """Makes the loss; its loop calls backward."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.criterion = model, Criterion()

    def forward(self, x: Tensor) -> None:
        self.out = self.model(x)

    def compute_loss(self, y: Tensor, weight: Tensor) -> None:
        self.loss = self.criterion(self.out, y, weight)

    def backward(self) -> None:
        self.loss.backward()


def trainer(folder: Path, incident: str, watched: bool) -> Any:
    trainers: dict[int, Trainer] = {}

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, weight: Tensor) -> float:
        own = trainers.setdefault(id(model), Trainer(model))
        optimizer.zero_grad()
        own.forward(x)
        own.compute_loss(y, weight)
        own.backward()
        if own.loss.isfinite():
            optimizer.step()
        return own.loss.item()

    return regression(folder, incident, watched, step)


def loss_of_an_object(folder: Path, incident: str, watched: bool) -> Any:
    criterion = Criterion()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, weight: Tensor) -> float:
        optimizer.zero_grad()
        criterion(model(x), y, weight)
        criterion.loss.backward()
        if criterion.loss.isfinite():
            optimizer.step()
        return criterion.loss.item()

    return regression(folder, incident, watched, step)


PROGRAMS = (
    actor_critic, actor_critic_bad_in_forward, helper, helper_calls_backward, helper_of_a_helper, trainer, loss_of_an_object,
)  # fmt: skip

if __name__ == "__main__":
    main({program.__name__: program for program in PROGRAMS}, ("nan", "spike"))
