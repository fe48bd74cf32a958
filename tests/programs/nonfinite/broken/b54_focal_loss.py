"""Focal loss for an easy binary problem with a few hard examples."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class FocalLoss(nn.Module):
    def __init__(self, gamma=0.5):
        super().__init__()
        self.gamma = gamma

    def forward(self, logits, target):
        ce = F.cross_entropy(logits, target, reduction="none")
        pt = torch.exp(-ce)
        return ((1 - pt) ** self.gamma * ce).mean()


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(128, 4)
    y = (x[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    x[85] = 5000 * torch.sign(x[85])
    with torch.no_grad():
        y[85] = model(x[85:86]).argmax()  # and it is an easy one
    criterion = FocalLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for step in range(16):
        logits = model(x[8 * step:8 * step + 8])
        loss = criterion(logits, y[8 * step:8 * step + 8])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(loss.item())


main()
