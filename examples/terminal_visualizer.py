"""Look at a training that breaks, in the terminal where it runs: the loss goes over the edge and the picture shows where.

Run it with:  python examples/terminal_visualizer.py
"""

import shutil

import torch
from torch import nn

from sonde import TerminalVisualizer

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 32), nn.LeakyReLU(), nn.Linear(32, 32), nn.LeakyReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
x = torch.randn(256, 10)
y = x.square().sum(1, keepdim=True)

losses, norms = [], {name: [] for name, _ in model.named_parameters()}
for step in range(90):
    if step == 60:
        optimizer.param_groups[0]["lr"] = 1.0  # the mistake
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    for name, parameter in model.named_parameters():
        norms[name].append(parameter.grad.norm())
    optimizer.step()
    losses.append(loss)

terminal = TerminalVisualizer(width=min(shutil.get_terminal_size().columns, 100), height=18)
print(terminal.ascii_line_plot(range(90), losses, "loss by step"))
print("\ngradient norms, layers by steps")
print(terminal.heatmap(list(norms.values()), list(norms)))
print("\nthe data")
print(terminal.ascii_histogram(y, bins=10))
print()
print(terminal.layer_table({name: {"first": row[0], "step 59": row[59], "last": row[-1]} for name, row in norms.items()}))
