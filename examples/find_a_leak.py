"""Three ways to run out of memory slowly, and who is to blame: a list, a running total, a hook.

Run it with:  python examples/find_a_leak.py
"""

import torch
from torch import nn

from sonde.leaks.leak_detector import LeakDetector


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))


def keep_losses(num_steps: int) -> None:
    model, watch, history = new_model(), LeakDetector(), []
    for _ in range(num_steps):
        loss = model(torch.randn(32, 20)).pow(2).mean()
        history.append(loss)  # should be loss.item()
        watch.step()
    report("a list of losses", watch)


def add_up_losses(num_steps: int) -> None:
    model, watch, total = new_model(), LeakDetector(), torch.zeros(())
    for _ in range(num_steps):
        loss = model(torch.randn(32, 20)).pow(2).mean()
        loss.backward()
        total += loss  # should be loss.item()
        watch.step()
    report("a running total", watch)


def remember_outputs(layer: nn.Module) -> None:
    outputs = []

    def remember(module, args, output):
        outputs.append(output)  # nobody ever takes them out

    layer.register_forward_hook(remember)


def forget_a_hook(num_steps: int) -> None:
    model, watch = new_model(), LeakDetector()
    remember_outputs(model[1])
    for _ in range(num_steps):
        model(torch.randn(32, 20)).pow(2).mean().backward()
        watch.step()
    report("a forgotten hook", watch)


def healthy(num_steps: int) -> None:
    model, watch, history = new_model(), LeakDetector(), []
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(num_steps):
        loss = model(torch.randn(32, 20)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.detach())
        watch.step()
    report("a healthy training", watch)


def report(what: str, watch: LeakDetector) -> None:
    print(f"{what}:")
    leaks = watch.leaks()
    for leak in leaks:
        print(f"  {leak.cause}\n  {leak.fix}")
    if not leaks:
        print("  nothing piles up")


for program in (keep_losses, add_up_losses, forget_a_hook, healthy):
    program(20)
