"""Multiple-instance learning: a bag's score is the log-sum-exp of its members."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def log_sum_exp(scores, dim):
    top = scores.max(dim=dim, keepdim=True).values
    shifted = scores - top
    return top.squeeze(dim) + shifted.exp().sum(dim).log()


class MIL(nn.Module):
    def __init__(self):
        super().__init__()
        self.instance = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, bag, present):
        scores = self.instance(bag).squeeze(-1)
        scores = scores.masked_fill(~present, -float("inf"))
        return log_sum_exp(scores, dim=1)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    bags = torch.randn(150, 7, 6)
    present = torch.rand(150, 7) < 0.6
    present[:, 0] = True
    label = (bags[:, 0, 0] > 0).float()
    present[108] = False
    net = MIL()
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    for step in range(15):
        b = slice(step * 10, step * 10 + 10)
        scores = net(bags[b], present[b])
        loss = F.binary_cross_entropy_with_logits(scores, label[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(loss.item())


main()
