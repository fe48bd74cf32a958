import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn


def parse():
    p = argparse.ArgumentParser(description="digits CNN with label smoothing")
    p.add_argument("--smoothing", type=float, default=0.2)
    p.add_argument("--epochs", type=int, default=8)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        )
        self.classifier = nn.Linear(96, 10)

    def forward(self, img):
        return self.classifier(torch.flatten(self.features(img), 1))


args = parse()
torch.manual_seed(args.seed)
torch.set_num_threads(1)
npz = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
img = torch.from_numpy(npz["images"]).float()[:, None] / 16
lab = torch.from_numpy(npz["labels"]).long()
tr, va = slice(0, 1408), slice(1408, None)

model = ConvNet()
criterion = nn.CrossEntropyLoss(label_smoothing=args.smoothing)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
train_img, train_lab = img[tr], lab[tr]

for epoch in range(1, args.epochs + 1):
    model.train()
    losses = []
    for b in torch.randperm(len(train_img)).view(-1, 32):
        optimizer.zero_grad()
        loss = criterion(model(train_img[b]), train_lab[b])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        acc = (model(img[va]).argmax(1) == lab[va]).float().mean().item()
    print(f"epoch {epoch}: smoothed loss {np.mean(losses):.3f} val acc {acc:.3f}")
print(f"final val_acc {acc:.3f}")
