"""Would fp16 be safe here? A small classifier whose attention scores grow too large for it, and its gradients too small.

Run it with:  python examples/stability_checker.py [picture.png]
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import sonde


class Scores(nn.Module):
    """Attention without the division by the root of the width: fine in float32, too large for float16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.scores = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(self.query(x) @ self.key(x).transpose(-1, -2)).softmax(-1) @ x


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), Scores(64), nn.Linear(64, 3))
with torch.no_grad():
    for layer in (model[2].query, model[2].key):
        layer.weight *= 400.0
inputs, targets = torch.randn(32, 10, 16), torch.randint(3, (32,))

checker = sonde.StabilityChecker()
issues = checker.check_model(model, inputs, loss=lambda output: nn.functional.cross_entropy(output.mean(1), targets))
print(f"in float32, which is in use: {len(issues)} issues\n")

for dtype in ("fp16", "bf16"):
    print(checker.would_be_safe(dtype), end="\n\n")

for issue in checker.get_issues("fp16"):
    if issue.kind == "overflow":
        print(f"{issue.layer}: {issue.margin_log2:+.1f} powers of two to the edge of {issue.dtype}")

picture = Path(sys.argv[1] if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="sonde-")) / "magnitudes.png")
checker.plot(picture)
print(f"magnitudes in {picture}")
