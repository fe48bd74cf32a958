"""What is in a tensor, how it changed over a training, and how two of them differ.

A deep tanh network is given weights that are too large; its last hidden layer drifts into saturation while it learns.

Run it with:  python examples/tensor_inspector.py [picture.png]
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import sonde

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
x = torch.randn(512, 20)
y = (x[:, :5].sum(1) > 0).long()

inspector = sonde.TensorInspector(max_tracked_tensors=200)
hidden = torch.empty(0)
for step in range(60):
    hidden = model[:3](x)
    loss = nn.functional.cross_entropy(model[3:](hidden), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    inspector.inspect_tensor(hidden, "hidden", layer="2", operation="linear", step=step)

first, last = inspector.history("hidden")[0], inspector.history("hidden")[-1]
print(last, end="\n\n")
print(f"The deviation went from {first.stats.std:.2f} to {last.stats.std:.2f}.\n")

print("first and last step (the first is gone by now):")
print(inspector.compare(first.id, last.id), end="\n\n")

print("in float32 and in bfloat16:")
print(inspector.compare(hidden, hidden.bfloat16()), end="\n\n")

print(inspector.memory())
for chain in inspector.holders(last.id):
    print(f"kept alive by: {chain}")

picture = Path(sys.argv[1] if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="sonde-")) / "hidden.png")
inspector.plot("hidden", picture)
print(f"percentiles over the training in {picture}")
