"""Pictures of a model with 500 layers: names are gathered by module, lines become bands, and one bad layer still stands out.

Run it with:  python examples/plots_of_a_big_model.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from sonde import DebugVisualizer, VisualizationConfig

folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="sonde-"))


class Block(nn.Module):
    """Ten layers and a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        around = x
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return around + x


torch.manual_seed(0)
model = nn.Sequential()
model.blocks = nn.Sequential(*(Block() for _ in range(50)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
x = torch.randn(32, 16)

weights = [(name.removesuffix(".weight"), parameter) for name, parameter in model.named_parameters() if name.endswith("weight")]
norms: list[list[float]] = [[] for _ in weights]
for step in range(20):
    loss = (model(x) - x.roll(1, 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if step >= 14:
        model.blocks[31].layers[4].weight.grad[0, 0] = float("nan")  # one number in 128,000
    for row, (_, parameter) in zip(norms, weights):
        row.append(parameter.grad.norm().item())
    model.blocks[31].layers[4].weight.grad.nan_to_num_()
    optimizer.step()

names = [name for name, _ in weights]
visualizer = DebugVisualizer(VisualizationConfig(output_directory=folder))
print(f"{len(names)} layers")
print(visualizer.plot_layer_heatmap("gradients of 500 layers", names, range(20), norms, label="gradient norm"))
print(visualizer.plot_gradient_flow("gradient flow of 500 layers", range(20), dict(zip(names, norms))))
print(visualizer.plot_weight_histogram("weights of 500 layers", dict(weights)))
