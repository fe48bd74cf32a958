"""Segmentation with a Dice loss and hard-sigmoid outputs."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, padding=1)
        self.up = nn.Conv2d(8, 1, 3, padding=1)
        nn.init.constant_(self.up.bias, -3.5)
        nn.init.constant_(self.up.weight, 0.3)
        nn.init.uniform_(self.down.weight, 0.0, 0.4)
        nn.init.zeros_(self.down.bias)

    def forward(self, x):
        return F.hardsigmoid(self.up(F.relu(self.down(x))))


def dice_loss(p, t):
    p, t = p.flatten(1), t.flatten(1)
    overlap = 2 * (p * t).sum(1)
    dice = overlap / (p.sum(1) + t.sum(1))
    return 1 - dice.mean()


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    image = torch.rand(96, 1, 8, 8)
    image[:, :, 2:5, 2:5] += 2
    mask = (image > 1.5).float()
    image[59], mask[59] = 0.0, 0.0
    net = Unet()
    opt = torch.optim.SGD(net.parameters(), lr=1e-3)
    for i in range(0, 96, 8):
        prediction = net(image[i:i + 8])
        loss = dice_loss(prediction, mask[i:i + 8])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("dice loss", loss.item())


main()
