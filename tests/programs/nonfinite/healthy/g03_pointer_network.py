"""Point at the largest of a varying number of items."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Pointer(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, items, present):
        scores = self.score(items).squeeze(-1)
        scores = scores.masked_fill(~present, float("-inf"))
        return torch.softmax(scores, dim=-1)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = Pointer()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    for step in range(150):
        items = torch.randn(32, 6, 3)
        present = torch.arange(6) < torch.randint(1, 7, (32, 1))
        answer = items[..., 0].masked_fill(~present, float("-inf")).argmax(1)
        p = net(items, present)
        loss = -torch.log(p.gather(1, answer[:, None]) + 1e-9).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("final loss", loss.item())


main()
