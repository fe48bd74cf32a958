"""Where the memory of a small language model goes, what a larger batch would need, and who keeps what should be gone.

Run it with:  python examples/memory_profiler.py [picture.png]
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import sonde


class Language(nn.Module):
    def __init__(self, vocabulary: int = 2000, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens)))


def loss_of(output):
    return output.flatten(0, 1).log_softmax(-1)[:, 0].mean().neg()


def train(model, optimizer, tokens, profiler):
    kept = []
    for step in range(10):
        output = model(tokens)
        loss = loss_of(output)
        if step < 2:
            profiler.snapshot("before backward")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept.append(output[:, -1])  # a mistake: it keeps every output, and its graph
    return profiler.report()


torch.manual_seed(0)
model = Language()
optimizer = torch.optim.Adam(model.parameters())
tokens = torch.randint(0, 2000, (8, 32))
with sonde.MemoryProfiler(model, optimizer) as profiler:
    report = train(model, optimizer, tokens, profiler)
print(report.summary(), end="\n\n")

print(profiler.forecast(inputs=tokens, batch_size=64, loss=loss_of))

picture = Path(sys.argv[1] if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="sonde-")) / "memory.png")
print(f"\ntimeline in {report.plot().save(picture)}")
