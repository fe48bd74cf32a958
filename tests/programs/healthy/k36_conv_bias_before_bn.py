from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def conv_bn_relu(cin, cout):
    return [nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(inplace=True)]


class VGGish(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.features = nn.Sequential(
            *conv_bn_relu(1, 12), nn.MaxPool2d(2),
            *conv_bn_relu(12, 24), nn.MaxPool2d(2),
            *conv_bn_relu(24, 32), nn.AdaptiveAvgPool2d(1),
        )
        self.classifier = nn.Linear(32, num_classes)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def main(epochs=6, batch_size=48, lr=5e-3):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    archive = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    x = torch.from_numpy(archive["images"]).float()[:, None] / 16
    y = torch.from_numpy(archive["labels"]).long()
    idx = torch.randperm(len(x))
    train, test = idx[:1440], idx[1440:]
    model = VGGish()
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.5)
    for epoch in range(epochs):
        model.train()
        for rows in train[torch.randperm(len(train))].split(batch_size):
            opt.zero_grad()
            loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            opt.step()
        sched.step()
        model.eval()
        with torch.no_grad():
            acc = (model(x[test]).argmax(1) == y[test]).float().mean().item()
        print(epoch, round(loss.item(), 4), round(acc, 4))
    print(f"final test_acc {acc:.3f}")


if __name__ == "__main__":
    main()
