"""A profile as a page of flames and as a trace for Perfetto, and a watched run as a trace of its steps.

Run it with:  python examples/flames_and_traces.py
"""

import torch
from torch import nn

import sonde
from sonde.export.perfetto import export

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters())

report = sonde.Profiler().profile(model, torch.randn(128, 64), repeats=3)
report.save("flames.html")
report.save("profile.json.gz")

with sonde.watch(model, optimizer, name="example") as session:
    for _ in range(50):
        x = torch.randn(128, 64)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
(trace,) = export(sonde.Run(session.run), None, replace=True)

print("open flames.html in a browser; drop profile.json.gz and", trace, "into https://ui.perfetto.dev")
