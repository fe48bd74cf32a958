"""Find the operation that creates a NaN, in a training whose loss is finite and whose weights are NaN one step later.

The model compares images by their distance. One pair holds the same image twice: the distance is 0, and the gradient of a square root
at 0 is infinite. The forward is finite; the backward creates the Inf.

Run it with:  python examples/find_origin.py
"""

import torch
from torch import nn

import sonde


class Compare(nn.Module):
    """The distance of two images in a learned space."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 16))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        apart = self.encoder(a) - self.encoder(b)
        return apart.square().sum(dim=1).sqrt()


torch.manual_seed(0)
model = Compare()
a, b = torch.randn(2, 12, 1, 8, 8)
b[7] = a[7]  # the same image twice
alike = torch.rand(12)

with sonde.find_origin(model) as search:
    loss = (model(a, b) - alike).square().mean()
    loss.backward()

print(f"loss {loss.item():.3f}; gradients that are not finite: {sum(not p.grad.isfinite().all() for p in model.parameters())} of 4\n")
print(search.origin)

# The same, stopped before the update makes the weights non-finite.
model.zero_grad()
optimizer = torch.optim.Adam(model.parameters())
try:
    with sonde.find_origin(model, raise_on_origin=True):
        (model(a, b) - alike).square().mean().backward()
        optimizer.step()
except sonde.NonFiniteError as error:
    print(f"\nstopped: {error.origin.key}; all weights are finite: {all(bool(p.isfinite().all()) for p in model.parameters())}")

# The infinities of an attention mask are intentional and not reported.
scores = torch.randn(4, 4, requires_grad=True)
with sonde.find_origin() as search:
    scores.masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf")).softmax(-1).square().sum().backward()
print(f"\na causal mask: {search}")
