"""The loss leaps now and then. Which sample does it?

Eight hundred recordings of a sensor; in one of them the sensor was restarted and wrote 65535. Every epoch meets it again, and each time one
update undoes a part of what was learnt. Sonde looks back at the step before the update is made and names the recording.

Run it with:  python examples/find_a_bad_sample.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sonde

torch.manual_seed(0)
time = torch.arange(24).float()
recordings = torch.sin(time / 3 + 6.28 * torch.rand(800, 1)) + 0.05 * torch.randn(800, 24)
following = recordings[:, -1] * 0.9 + 0.05 * torch.randn(800)
recordings[333, 7] = 65535.0


class Forecast(nn.Module):
    """The next value of a series."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 32)
        self.last = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x))).squeeze(1)


model = Forecast()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
loader = DataLoader(TensorDataset(recordings, following), batch_size=20, shuffle=True)

with sonde.watch(model, optimizer, to="find_a_bad_sample_run") as session:
    for _ in range(5):
        for x, y in loader:
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

found = next(finding for finding in session.report().findings if finding.rule == "loss-spike")
print(f"{found.severity}: {found.cause}")
print(f"fix: {found.fix}")
assert found.evidence["indices"] == "333"
