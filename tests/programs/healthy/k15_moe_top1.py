"""A mixture of sixteen experts, each sample goes to one of them, on a piecewise task."""
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(4)
torch.set_num_threads(1)

NUM_EXPERTS = 16
DIM = 12


class Expert(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc = nn.Linear(dim, dim)

    def forward(self, x):
        return torch.tanh(self.fc(x))


class SwitchLayer(nn.Module):
    def __init__(self, dim, num_experts):
        super().__init__()
        self.gate = nn.Linear(dim, num_experts)
        self.experts = nn.ModuleList([Expert(dim) for _ in range(num_experts)])

    def forward(self, x):
        scores = self.gate(x)
        if self.training:
            scores = scores + 0.2 * torch.randn_like(scores)  # exploration, so that no expert starves
        probs = scores.softmax(dim=-1)
        weight, choice = probs.max(dim=-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = (choice == e).nonzero(as_tuple=True)[0]
            if len(rows) == 0:
                continue
            out = out.index_add(0, rows, weight[rows, None] * expert(x[rows]))
        # switch-transformer balance term: share of samples times mean probability
        share = F.one_hot(choice, probs.shape[1]).float().mean(0)
        balance = probs.shape[1] * (share * probs.mean(0)).sum()
        return x + out, balance


class MoEClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(2, DIM)
        self.moe = SwitchLayer(DIM, NUM_EXPERTS)
        self.norm = nn.LayerNorm(DIM)
        self.out = nn.Linear(DIM, 4)

    def forward(self, x):
        h, balance = self.moe(self.inp(x))
        return self.out(self.norm(h)), balance


def spirals(n):
    """Four interleaved spiral arms."""
    label = torch.randint(4, (n,))
    radius = torch.rand(n).sqrt()
    angle = label * (torch.pi / 2) + 3.5 * radius + 0.1 * torch.randn(n)
    return 2 * torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), label


x_train, y_train = spirals(4000)
x_val, y_val = spirals(1000)
model = MoEClassifier()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)

for step in range(256):
    model.train()
    idx = torch.randint(len(x_train), (32,))
    logits, balance = model(x_train[idx])
    loss = F.cross_entropy(logits, y_train[idx]) + 0.1 * balance
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 64 == 63:
        model.eval()
        with torch.no_grad():
            acc = (model(x_val)[0].argmax(1) == y_val).float().mean().item()
        print(f"step {step + 1}: loss {loss.item():.3f} balance {balance.item():.2f} val {acc:.3f}")
print(f"final val_acc {acc:.3f}")
