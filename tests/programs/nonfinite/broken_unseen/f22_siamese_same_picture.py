"""Siamese verification with a contrastive loss; one pair is a picture with itself."""
import torch
import torch.nn as nn


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 12))

    def forward_once(self, x):
        return self.net(x)

    def forward(self, a, b):
        return self.forward_once(a), self.forward_once(b)


class ContrastiveLoss(nn.Module):
    def __init__(self, margin=1.0):
        super().__init__()
        self.margin = margin

    def forward(self, e1, e2, same):
        dist = (e1 - e2).pow(2).sum(1).sqrt()
        pull = same * dist.pow(2)
        push = (1 - same) * torch.clamp(self.margin - dist, min=0).pow(2)
        return (pull + push).mean()


def make_pairs(step, size=14):
    g = torch.Generator().manual_seed(1000 + step)
    a = torch.rand(size, 1, 8, 8, generator=g)
    same = (torch.rand(size, generator=g) > 0.5).float()
    b = torch.where(same[:, None, None, None] > 0, a + 0.1 * torch.randn(a.shape, generator=g), torch.rand(a.shape, generator=g))
    if step == 21:
        b[11] = a[11]
        same[11] = 1.0
    return a, b, same


if __name__ == "__main__":
    torch.manual_seed(40)
    model = Siamese()
    loss_fn = ContrastiveLoss()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4)
    for step in range(30):
        a, b, same = make_pairs(step)
        out1, out2 = model(a, b)
        loss = loss_fn(out1, out2, same)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print("step", step, "loss", loss.item())
