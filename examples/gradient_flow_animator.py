"""Watch gradients fade on their way to the first layer: sixteen sigmoids against sixteen ReLUs with residual connections.

Run it with:  python examples/gradient_flow_animator.py [directory for the exports]
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import sonde


class Block(nn.Module):
    def __init__(self, activation: nn.Module, residual: bool) -> None:
        super().__init__()
        self.linear, self.activation, self.residual = nn.Linear(32, 32), activation, residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.activation(self.linear(x))
        return x + y if self.residual else y


def record(activation: nn.Module, residual: bool) -> sonde.GradientFlowAnimator:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(activation, residual) for _ in range(8)), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    animator = sonde.GradientFlowAnimator(max_frames=60)
    for step in range(60):
        x = torch.randn(64, 32)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        animator.record_step(step, {f"{i}": layer[-1].grad for i, layer in enumerate(map(weights, model))})
        optimizer.step()
    return animator


def weights(layer: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in layer.parameters() if parameter.ndim == 2]


out = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="sonde-"))
for title, animator in {
    "sigmoid": record(nn.Sigmoid(), residual=False),
    "residual ReLU": record(nn.ReLU(), residual=True),
}.items():
    summary = animator.summary_report()
    print(f"{title}: {summary.overall_health}")
    print(animator.to_ascii_animation())
    print(*summary.recommendations, sep="\n", end="\n\n")
    stem = title.replace(" ", "-")
    animator.export_csv(out / f"{stem}.csv")
    animator.export_html(out / f"{stem}.html")
print(f"Scrub through it in {out / 'sigmoid.html'}")
