"""Draw a training: what the layers put out, how gradients flow, how weights are spread; then all of it on one page.

Run it with:  python examples/debug_visualizer.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from sonde import DebugVisualizer, VisualizationConfig

folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="sonde-"))
visualizer = DebugVisualizer(VisualizationConfig(output_directory=folder, format="png"))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x = torch.randn(600, 20)
y = (x[:, :3] + 0.1 * torch.randn(600, 3)).argmax(1)

norms: dict[str, list[float]] = {name: [] for name, _ in model.named_parameters() if name.endswith("weight")}
for _ in range(150):
    rows = torch.randint(len(x), (64,))
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    for name, parameter in model.named_parameters():
        if name in norms and parameter.grad is not None:
            norms[name].append(parameter.grad.norm().item())
    optimizer.step()

steps = range(150)
hidden = model[:2](x[:64])
for path in (
    visualizer.plot_gradient_flow("gradient flow", steps, norms),
    visualizer.plot_layer_heatmap("gradients by layer", list(norms), steps, list(norms.values()), label="gradient norm"),
    visualizer.plot_tensor_distribution("hidden activations", hidden, bins=50),
    visualizer.plot_activation_heatmap("hidden units", hidden),
    visualizer.plot_weight_histogram("weights", model),
    visualizer.create_dashboard(),
):
    print(path)
