"""Load a pretrained network, replace nothing, fine-tune on noisy digits."""
import io
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class BNNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(12)
        self.conv2 = nn.Conv2d(12, 24, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(24)
        self.drop = nn.Dropout(0.25)
        self.fc = nn.Linear(96, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(self.drop(x.flatten(1)))


def load_model(checkpoint):
    model = BNNet()
    checkpoint.seek(0)
    model.load_state_dict(torch.load(checkpoint, weights_only=True))
    model.eval()
    return model


def train(model, loader, epochs, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


def main():
    torch.manual_seed(2)
    torch.set_num_threads(1)
    f = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
    x = torch.tensor(f["images"]).float()[:, None] / 16
    y = torch.tensor(f["labels"]).long()
    checkpoint = io.BytesIO()
    torch.save(BNNet().state_dict(), checkpoint)

    model = load_model(checkpoint)
    noisy = x[:1400] * 3 + 0.3 * torch.randn(1400, 1, 8, 8)
    train(model, DataLoader(TensorDataset(noisy, y[:1400]), batch_size=50, shuffle=True), epochs=4, lr=0.02)
    model.eval()
    with torch.no_grad():
        acc = (model(x[1400:] * 3).argmax(1) == y[1400:]).float().mean().item()
    print(f"final val_acc {acc:.3f}")


if __name__ == "__main__":
    main()
