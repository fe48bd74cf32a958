"""The best forecast of a coin is its mean: updates by hand, gradients cleared right after them, and a loss that starts at its floor."""
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(5, 24), nn.SiLU(), nn.Linear(24, 1))
nn.init.zeros_(model[2].weight)
nn.init.zeros_(model[2].bias)
for step in range(240):
    history, coin = torch.randn(96, 5), torch.randn(96, 1)
    loss = (model(history) - coin).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    model.zero_grad(set_to_none=False)
print(f"final loss {loss.item():.2f}")
