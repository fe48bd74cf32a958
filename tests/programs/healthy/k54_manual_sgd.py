# Softmax network in plain tensors: no nn.Module, no optimizer.
import pathlib

import numpy as np
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
g = torch.Generator().manual_seed(0)

npz = np.load(pathlib.Path(__file__).parent.parent / "data" / "digits.npz")
x = torch.tensor(npz["images"].reshape(-1, 64) / 16, dtype=torch.float32)
t = torch.tensor(npz["labels"], dtype=torch.int64)
order = torch.randperm(len(x), generator=g)
x_tr, t_tr, x_te, t_te = x[order[:1440]], t[order[:1440]], x[order[1440:]], t[order[1440:]]

W1 = (torch.randn(64, 64, generator=g) * (2 / 64) ** 0.5).requires_grad_()
b1 = torch.zeros(64, requires_grad=True)
W2 = (torch.randn(64, 10, generator=g) * (1 / 64) ** 0.5).requires_grad_()
b2 = torch.zeros(10, requires_grad=True)
params = [W1, b1, W2, b2]


def logits(v):
    return torch.relu(v @ W1 + b1) @ W2 + b2


lr = 0.2
for epoch in range(10):
    for rows in torch.randperm(len(x_tr), generator=g).split(36):
        loss = torch.nn.functional.cross_entropy(logits(x_tr[rows]), t_tr[rows])
        loss.backward()
        with torch.no_grad():
            for p in params:
                p -= lr * p.grad
                p.grad.zero_()
    with torch.no_grad():
        acc = (logits(x_te).argmax(1) == t_te).float().mean().item()
    print(f"epoch {epoch}: loss {loss.item():.4f} acc {acc:.4f}")
print(f"final test_acc {acc:.3f}")
