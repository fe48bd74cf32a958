"""Weights of a small classifier, good and spoilt: how they were initialised, what has collapsed, which units do nothing.

Run it with:  python examples/weight_analyzer.py [picture.png]
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import sonde

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(20, 64), nn.ReLU(),
    nn.Linear(64, 64), nn.ReLU(),
    nn.Linear(64, 64), nn.Tanh(),
    nn.Linear(64, 3),
)  # fmt: skip
nn.init.kaiming_normal_(model[0].weight, nonlinearity="relu")
nn.init.orthogonal_(model[4].weight)
with torch.no_grad():
    model[0].weight[7] = 0.0  # a unit that was pruned
    model[2].bias[:5] = -50.0  # units that a step too large has killed
    model[2].weight[:, 32:] = 0.0

analyzer = sonde.WeightAnalyzer()
report = analyzer.analyze_model(model, data=torch.randn(512, 20))
print(report.summary(), end="\n\n")

for neuron in report.dead_neurons("activations"):
    print(f"unit {neuron.unit} of layer {neuron.layer}: {neuron.reason}")

picture = Path(sys.argv[1] if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="sonde-")) / "weights.png")
print(f"histograms in {analyzer.plot_weight_histogram(model, picture)}")
