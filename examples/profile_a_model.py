"""Where does the time of a training step go? Layer by layer, forward and backward; then one layer is changed, and the two are compared.

Run it with:  python examples/profile_a_model.py [profile.json]
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import sonde


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(100, 64)
        self.blocks = nn.ModuleList(Block(64, hidden) for _ in range(2))
        self.head = nn.Linear(64, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(0)
profiler = sonde.Profiler()
with profiler.section("making the batch"):
    tokens = torch.randint(100, (8, 32))


def loss(logits: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


model = Model()
before = profiler.profile(model, tokens, loss=loss, optimizer=torch.optim.AdamW(model.parameters()))
print(before.summary())

wide = Model(hidden=1024)
after = profiler.profile(wide, tokens, loss=loss, optimizer=torch.optim.AdamW(wide.parameters()))
print("\nwith a feed-forward that is eight times as wide:", after.compare(before).sentence)

path = Path(sys.argv[1] if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="sonde-")) / "profile.json")
print("saved as", before.save(path))
