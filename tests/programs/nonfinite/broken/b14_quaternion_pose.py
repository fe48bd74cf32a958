"""Camera pose: predict a unit quaternion, minimise the angle to the true one."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class PoseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.quaternion = nn.Linear(32, 4)
        nn.init.zeros_(self.quaternion.weight)
        with torch.no_grad():
            self.quaternion.bias.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0]))  # start from "no rotation"

    def forward(self, x):
        return F.normalize(self.quaternion(self.trunk(x)), dim=-1)


class AngleLoss(nn.Module):
    def forward(self, predicted, true):
        cosine = (predicted * true).sum(-1).abs().clamp(max=1.0)
        angle = 2 * torch.acos(cosine)
        return angle.mean()


def main():
    torch.manual_seed(1)
    torch.set_num_threads(1)
    x = torch.randn(64, 9)
    true = F.normalize(torch.randn(64, 4), dim=-1)
    true[5] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    true[13] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    net, criterion = PoseNet(), AngleLoss()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(8):
        batch = torch.arange(16) + 16 * (step % 4)
        loss = criterion(net(x[batch]), true[batch])
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(step, loss.item())


main()
