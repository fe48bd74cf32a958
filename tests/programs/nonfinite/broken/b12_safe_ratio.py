"""Odds from two counts that a network smooths; a ratio by nothing counts as zero."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def safe_ratio(a, b):
    ratio = a / b
    return torch.where(b > 0, ratio, torch.zeros_like(ratio))


class Odds(nn.Module):
    def __init__(self):
        super().__init__()
        self.wins = nn.Linear(4, 8)
        self.losses = nn.Linear(4, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        w = F.relu(self.wins(x)) + 0.1
        l = F.relu(self.losses(x))
        return self.out(torch.log1p(safe_ratio(w, l)))


def train_one_epoch(model, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        prediction = model(x).squeeze(-1)
        loss = F.binary_cross_entropy_with_logits(prediction, y)
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.rand(120, 4)
    y = (x[:, 0] > x[:, 2]).float()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=12)
    model = Odds()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    print(train_one_epoch(model, loader, optimizer))


main()
