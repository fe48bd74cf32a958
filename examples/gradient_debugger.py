"""Gradients of a recurrent model whose data hold a few broken recordings: spikes, the clipping that the debugger advises, and its effect.

Run it with:  python examples/gradient_debugger.py [picture.png]
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import sonde


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(8, 32, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def train(max_norm: float | None = None) -> tuple[sonde.GradientDebugger, float]:
    torch.manual_seed(0)
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with sonde.GradientDebugger(micro_batch_size=32).register_hooks(model, optimizer) as debugger:
        for step in range(60):
            optimizer.zero_grad()
            for micro_batch in range(2):  # two micro-batches make a step, which also gives the noise scale
                x = torch.randn(32, 12, 8)
                y = (x[:, -1, 0] > 0).long()
                if step in (25, 40, 55) and micro_batch == 1:
                    x[:4] *= -300  # recordings whose volume was wrong, and their sign
                loss = nn.functional.cross_entropy(model(x), y)
                (loss / 2).backward()
                losses.append(loss.item())
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
    return debugger, sum(losses[-8:]) / 8


debugger, loss = train()
report = debugger.analyze()
print(report.summary(), end="\n\n")

limit = report.clipping.max_norm
_, clipped_loss = train(max_norm=limit)
print(f"loss at the end: {loss:.3g} as it was, {clipped_loss:.3g} clipped at {limit:g}")

picture = Path(sys.argv[1] if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="sonde-")) / "norms.png")
report.plot(picture)
print(f"norms by layer and step: {picture}")
