# small convnet, the whole validation set fits into one batch
from pathlib import Path
import numpy as np
import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.3))
        self.classify = nn.Linear(12 * 16, 10)

    def forward(self, img):
        return self.classify(self.features(img).flatten(1))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    npz = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
    img = torch.from_numpy(npz["images"]).float()[:, None] / 16
    lab = torch.from_numpy(npz["labels"]).long()
    img_val, lab_val = img[1500:], lab[1500:]
    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    ce = nn.CrossEntropyLoss()
    for epoch in range(6):
        for idx in torch.randperm(1500).split(60):
            loss = ce(net(img[idx]), lab[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            out = net(img_val)
            print("epoch", epoch, "val loss", ce(out, lab_val).item(), "val acc", (out.argmax(1) == lab_val).float().mean().item())


main()
