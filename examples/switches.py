"""Switches that are flipped while it trains, by hand and by a condition; a number of your own with the steps.

Run it with:  python examples/switches.py
"""

import logging
import sys

import torch
from torch import nn

import sonde

logging.basicConfig(stream=sys.stdout, format="%(message)s")

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

with sonde.watch(model, optimizer, name="switches") as session:
    session.metric("weight norm", lambda: model[0].weight.norm(), every=10)
    session.when("step == 60", then=["autograd_profiler"], for_steps=20)  # for instance; "loss_spike" is a more useful one
    for step in range(100):
        if step == 20:
            session.enable_debugging(["gradient_norms", "memory_usage"])
        if step == 22:
            session.disable_debugging()
        x = torch.randn(16, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, state in session.get_debugging_status().items():
        if state["num_lines"]:
            print(f"{name}: {state['num_lines']} lines, {state['cost_ms']:.1f} ms")

run = sonde.Run(session.run)
print("weight norm", [round(float(value), 2) for value in run.scalar("weight norm")[1]])
