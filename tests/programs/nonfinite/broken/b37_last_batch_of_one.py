"""Batch standardisation by hand; the last batch of the epoch is small."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class BatchStandardise(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, h):
        spread = h.std(dim=0) + 1e-5
        return self.gamma * (h - h.mean(dim=0)) / spread


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 16)
        self.bn = BatchStandardise(16)
        self.out = nn.Linear(16, 2)

    def forward(self, x):
        return self.out(F.relu(self.bn(self.fc(x))))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(97, 5)
    y = (x[:, 0] > 0).long()
    data = torch.utils.data.TensorDataset(x, y)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for xb, yb in torch.utils.data.DataLoader(data, batch_size=16):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


main()
