"""Hooks of your own: track gradients, be told when they get steep, keep the tensor that broke, and stop before it reaches the weights.

A small regression whose data hold one broken number: a feature that some exporter wrote as 1e38. Every output of every layer stays
finite, and so does the gradient of each; but the gradient of the first weights does not, and one update with it would ruin the model.

Run it with:  python examples/hooks.py [folder for snapshots]
"""

import logging
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from sonde import AlertSeverity, HookAction, HookBuilder, Hooks, HookTrigger, TrainingStopped

logging.getLogger("sonde").addHandler(logging.NullHandler())  # alerts are printed below instead
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())

torch.manual_seed(0)
x = torch.randn(4000, 8)
y = x[:, :3].sum(1, keepdim=True)
x[2500, 5] = 1e38

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

hooks = Hooks()
hooks.register_hook(
    HookBuilder("gradients").trigger(HookTrigger.EVERY_BACKWARD).action(HookAction.TRACK_GRADIENTS).layer_patterns(["0", "2", "4"]).build()
)
hooks.register_hook(HookBuilder("steep").when("grad_norm > 100 and step > 10").alert(AlertSeverity.WARNING, "steep gradient").build())
hooks.register_hook(HookBuilder("large").when("max_abs > 1e30").layer_patterns("*").snapshot_to(folder).max_executions(1).build())
hooks.register_hook(
    HookBuilder("broken").trigger(HookTrigger.ON_ANOMALY).alert(AlertSeverity.CRITICAL).action(HookAction.STOP_TRAINING).max_executions(1).build()
)
hooks.send_alerts_to(lambda alert: print(f"{alert.severity}: {alert}"))

try:
    with hooks.attach(model, optimizer):
        for step in range(200):
            rows = slice(step * 20, step * 20 + 20)
            loss = (model(x[rows]) - y[rows]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            hooks.log(loss=loss)
            optimizer.step()
except TrainingStopped as stopped:
    print(f"\n{stopped}")
    print(f"{stopped.num_updates} updates were made; all weights are finite: {all(bool(p.isfinite().all()) for p in model.parameters())}")

print("\nhow the hooks did:")
print(*hooks.status().values(), sep="\n")

print("\ngradient norms at the last steps:")
for layer, norms in hooks.gradients.items():
    print(f"  {layer}:", ", ".join(f"{norm:.3g}" for _, norm in norms[-4:]))

(snapshot,) = (result.value for result in hooks.results if result.action is HookAction.SAVE_SNAPSHOT)
with np.load(snapshot) as file:
    row = int(np.abs(file["values"]).max(1).argmax())
    print(f"\n{snapshot.name}: row {row} of the batch is the culprit, which is sample {125 * 20 + row} of the data")
