"""Three memory leaks and the variable that holds each: a list of losses, a running total, a forward hook.

Run it with:  python examples/find_a_leak.py
"""

import torch
from torch import nn

from sonde import LeakDetector


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))


def keep_losses(num_steps: int) -> None:
    model, detector, history = new_model(), LeakDetector(), []
    for _ in range(num_steps):
        loss = model(torch.randn(32, 20)).pow(2).mean()
        history.append(loss)  # should be loss.item()
        detector.step()
    report("a list of losses", detector)


def add_up_losses(num_steps: int) -> None:
    model, detector, total = new_model(), LeakDetector(), torch.zeros(())
    for _ in range(num_steps):
        loss = model(torch.randn(32, 20)).pow(2).mean()
        loss.backward()
        total += loss  # should be loss.item()
        detector.step()
    report("a running total", detector)


def remember_outputs(layer: nn.Module) -> None:
    outputs = []

    def remember(module, args, output):
        outputs.append(output)  # never removed

    layer.register_forward_hook(remember)


def forget_a_hook(num_steps: int) -> None:
    model, detector = new_model(), LeakDetector()
    remember_outputs(model[1])
    for _ in range(num_steps):
        model(torch.randn(32, 20)).pow(2).mean().backward()
        detector.step()
    report("a hook that is never removed", detector)


def healthy(num_steps: int) -> None:
    model, detector, history = new_model(), LeakDetector(), []
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(num_steps):
        loss = model(torch.randn(32, 20)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.detach())
        detector.step()
    report("a healthy training", detector)


def report(what: str, detector: LeakDetector) -> None:
    print(f"{what}:")
    leaks = detector.leaks()
    for leak in leaks:
        print(f"  {leak.cause}\n  {leak.fix}")
    if not leaks:
        print("  no tensors accumulate")


for program in (keep_losses, add_up_losses, forget_a_hook, healthy):
    program(20)
