"""What would make this training faster? An optimizer that walks over eighty small tensors one by one, and what torch offers instead.

The same from the command line, for everything that can be tried:  sonde tune train.py

Run it with:  python examples/tune_a_script.py
"""

import tempfile
from pathlib import Path

from sonde.tuning.tune import tune

TRAINING = """
import torch
from torch import nn

torch.set_num_threads(1)
model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(40)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(10_000):
    x = torch.randn(32, 16)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

with tempfile.TemporaryDirectory() as folder:
    script = Path(folder) / "train.py"
    script.write_text(TRAINING)
    tuning = tune(str(script), only=["optimizer"], steps=20, repeats=1)

print(f"as it is     {tuning.baseline.step_ms:6.1f} ms per step; runs differ by {tuning.baseline.noise_share:.0%}")
for measured in tuning.results:
    gain = f"{measured.gain.factor:.2f} times as fast" if measured.gain else measured.error
    print(f"{measured.name:12} {measured.step_ms:6.1f} ms per step, {gain}; loss {measured.loss.kind}; {measured.standing}")
if tuning.recommended:
    (change,) = tuning.recommended.proposals
    print(f"\n{change.site.line}  {change.site.text}\n{'':{len(change.site.line)}}  {change.change}")
