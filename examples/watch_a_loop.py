"""One line around a loop of your own: watch a small classifier learn, log a number of your own, and read the verdict.

Run it with:  python examples/watch_a_loop.py
"""

import torch
from torch import nn

import sonde

torch.manual_seed(0)
x = torch.randn(2000, 20)
y = (x[:, :5].sum(1) > 0).long()

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

with sonde.watch(model, optimizer, name="example") as session:
    for _ in range(300):
        rows = torch.randint(len(x), (64,))
        logits = model(x[rows])
        loss = nn.functional.cross_entropy(logits, y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(accuracy=(logits.argmax(1) == y[rows]).float().mean())

print(session.report().summary())

run = sonde.Run(session.run)
steps, norms = run.series("gradient", "0.weight", "l2")
print(f"gradient of 0.weight, observed at {len(steps)} steps: {norms[0]:.3f} at first, {norms[-1]:.3f} at last")
