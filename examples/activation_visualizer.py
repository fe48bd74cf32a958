"""What two attention layers and a feed-forward layer put out, in numbers and in pictures.

Run it with:  python examples/activation_visualizer.py [directory for the pictures]
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import sonde


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.feed_forward = nn.Sequential(nn.Linear(32, 64), nn.ReLU(inplace=True), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x)[0]
        return x + self.feed_forward(x)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        self.layer = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layer:
            x = layer(x)
        return x


torch.manual_seed(0)
model = Encoder()
with torch.no_grad():
    model.layer[1].feed_forward[0].weight[9] *= 40  # one unit that is far too loud

with sonde.ActivationVisualizer() as visualizer:
    visualizer.register_forward_hook(model, "layer.0.attention")
    visualizer.register_forward_hook(model, "layer.1.feed_forward.*")
    model(torch.randint(100, (4, 24)))

print(visualizer.summary(), end="\n\n")
for outlier in visualizer.outliers("layer.1.feed_forward.1")[:3]:
    print(f"outlier {outlier.value:.3g} at batch, token, unit {outlier.index}")

out = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="sonde-"))
activations = visualizer.get_activations("layer.0.attention")
print(visualizer.plot_heatmap(activations, out / "attention.png", name="layer.0.attention"))
print(visualizer.plot_distribution("layer.1.feed_forward.1", out / "feed_forward.png"))
