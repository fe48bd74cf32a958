"""Fit a damped oscillation with L-BFGS: the optimizer calls the closure several times per step."""
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)

t = torch.linspace(0, 4, 160).unsqueeze(1)
signal = torch.exp(-0.5 * t) * torch.cos(3 * t)
observed = signal + 0.02 * torch.randn_like(signal)

net = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4, history_size=20, line_search_fn="strong_wolfe")


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(t), observed)
    loss.backward()
    return loss


for step in range(90):
    loss = optimizer.step(closure)
    if step % 15 == 14:
        print(f"step {step + 1} mse {loss.item():.6f}")

with torch.no_grad():
    r2 = 1 - ((net(t) - signal) ** 2).mean() / signal.var()
print(f"final r2 {r2.item():.4f}")
