"""Small trainings that leak, and healthy ones that look similar. Each calls `step()` at the end of every step."""

from __future__ import annotations

import copy
import functools
import random
from collections import deque
from collections.abc import Callable

import torch
from torch import nn

Step = Callable[[], None]
GLOBAL_CACHE: dict[int, torch.Tensor] = {}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def batch() -> torch.Tensor:
    return torch.randn(8, 16)


def loss_of(net: nn.Module) -> torch.Tensor:
    return net(batch()).pow(2).mean()


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# ---- leaking


def list_of_losses(num_steps: int, step: Step) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    history = []
    for _ in range(num_steps):
        loss = loss_of(net)
        update(optimizer, loss)
        history.append(loss)
        step()


def list_of_outputs(num_steps: int, step: Step) -> None:
    net = model()
    outputs = []
    for _ in range(num_steps):
        outputs.append(net(batch()))
        step()


def total_of_losses(num_steps: int, step: Step) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    total = torch.zeros(())
    for _ in range(num_steps):
        loss = loss_of(net)
        update(optimizer, loss)
        total += loss
        step()


def total_without_backward(num_steps: int, step: Step) -> None:
    net = model()
    running = 0.0
    for _ in range(num_steps):
        running = running + loss_of(net)
        step()


def hook_closure(num_steps: int, step: Step) -> None:
    net = model()
    collect_outputs(net[1])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(num_steps):
        update(optimizer, loss_of(net))
        step()


def collect_outputs(layer: nn.Module) -> None:
    collected = []

    def remember(module, args, output):
        collected.append(output)

    layer.register_forward_hook(remember)


class Trainer:
    def __init__(self) -> None:
        self.net = model()
        self.records: list[tuple[int, torch.Tensor]] = []

    def fit(self, num_steps: int, step: Step) -> None:
        for number in range(num_steps):
            output = self.net(batch())
            self.records.append((number, output))
            step()


def attribute(num_steps: int, step: Step) -> None:
    Trainer().fit(num_steps, step)


def global_dict_of_batches(num_steps: int, step: Step) -> None:
    GLOBAL_CACHE.clear()
    for number in range(num_steps):
        GLOBAL_CACHE[number] = torch.randn(64, 64)  # no graph, but 16 KiB each
        step()
    GLOBAL_CACHE.clear()


def small_views_of_large_batches(num_steps: int, step: Step) -> None:
    firsts = []
    for _ in range(num_steps):
        firsts.append(torch.randn(64, 64)[0])
        step()


def hidden_state_carried_on(num_steps: int, step: Step) -> None:
    cell = nn.GRUCell(16, 16)
    hidden = torch.zeros(8, 16)
    for _ in range(num_steps):
        hidden = cell(batch(), hidden)
        step()


def every_third_step(num_steps: int, step: Step) -> None:
    net = model()
    logged = []
    for number in range(num_steps):
        loss = loss_of(net)
        if number % 3 == 0:
            logged.append(loss)
        step()


LEAKING = {
    list_of_losses: "list_of_losses() local 'history' -> list[",
    list_of_outputs: "list_of_outputs() local 'outputs' -> list[",
    total_of_losses: "total_of_losses() local 'total' -> AddBackward0 graph",
    total_without_backward: "total_without_backward() local 'running' -> AddBackward0 graph",
    hook_closure: "hook_closure() local 'net.1' -> forward hook -> remember() closure 'collected' -> list[",
    attribute: "Trainer.fit() local 'self.records' -> list[",
    global_dict_of_batches: "leak_programs global 'GLOBAL_CACHE' -> dict[",
    small_views_of_large_batches: "small_views_of_large_batches() local 'firsts' -> list[",
    hidden_state_carried_on: "hidden_state_carried_on() local 'hidden' -> ",
    every_third_step: "every_third_step() local 'logged' -> list[",
}


# ---- healthy


def ordinary_training(num_steps: int, step: Step) -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    history = []
    for _ in range(num_steps):
        loss = loss_of(net)
        update(optimizer, loss)
        history.append(loss.item())
        step()


def detached_losses(num_steps: int, step: Step) -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), amsgrad=True)
    history = []
    for _ in range(num_steps):
        loss = loss_of(net)
        update(optimizer, loss)
        history.append(loss.detach())
        step()


def weight_average(num_steps: int, step: Step) -> None:
    net = model()
    average = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(num_steps):
        update(optimizer, loss_of(net))
        with torch.no_grad():
            for averaged, current in zip(average.parameters(), net.parameters()):
                averaged.data = 0.9 * averaged + 0.1 * current
        step()


def replay_buffer(num_steps: int, step: Step) -> None:
    buffer = deque(maxlen=1000)  # never full here, but bounded
    for _ in range(num_steps):
        buffer.append(torch.randn(64, 64))
        step()


def full_buffer(num_steps: int, step: Step) -> None:
    buffer = []
    for _ in range(num_steps):
        buffer.append(torch.randn(64, 64))
        if len(buffer) > num_steps // 4:
            buffer.pop(0)
        step()


def reservoir(num_steps: int, step: Step) -> None:
    chance = random.Random(0)
    sample = []
    for number in range(num_steps):
        item = torch.randn(64, 64)
        if len(sample) < num_steps // 4:
            sample.append(item)
        elif chance.random() < num_steps / 4 / number:
            sample[chance.randrange(len(sample))] = item
        step()


def cache_that_fills_up(num_steps: int, step: Step) -> None:
    cache = {}
    for number in range(num_steps):
        cache.setdefault(number % (num_steps // 3), torch.randn(64, 64))
        step()


def outputs_of_an_epoch(num_steps: int, step: Step) -> None:
    net = model()
    outputs = []
    for number in range(num_steps):
        outputs.append(net(batch()))
        if number % (num_steps // 4) == num_steps // 4 - 1:
            torch.cat(outputs).mean().backward()
            outputs.clear()
        step()


def accumulated_loss(num_steps: int, step: Step) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    total = torch.zeros(())
    for number in range(num_steps):
        total = total + loss_of(net)
        if number % 4 == 3:
            update(optimizer, total)
            total = torch.zeros(())
        step()


def growing_then_steady_graph(num_steps: int, step: Step) -> None:
    net = model()
    for number in range(num_steps):
        loss = sum(loss_of(net) for _ in range(1 if number < num_steps // 2 else 5))  # a curriculum
        loss.backward()
        step()


def memoized(num_steps: int, step: Step) -> None:
    @functools.lru_cache(maxsize=500)
    def features(number: int) -> torch.Tensor:
        return torch.randn(64, 64)

    for number in range(num_steps):
        features(number)
        step()


def cycles_that_wait_for_the_collector(num_steps: int, step: Step) -> None:
    for _ in range(num_steps):
        node = {"value": torch.randn(64, 64)}
        node["self"] = node
        del node
        step()


HEALTHY = [
    ordinary_training,
    detached_losses,
    weight_average,
    replay_buffer,
    full_buffer,
    reservoir,
    cache_that_fills_up,
    outputs_of_an_epoch,
    accumulated_loss,
    growing_then_steady_graph,
    memoized,
    cycles_that_wait_for_the_collector,
]
