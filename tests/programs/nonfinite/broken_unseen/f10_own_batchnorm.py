"""Small CNN with its own batch norm, without an eps; one batch is padded with grey."""
import torch
from torch import nn


def block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU())


class InputNorm(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(c))
        self.register_buffer("seen", torch.zeros(c))

    def forward(self, x):
        var, mean = torch.var_mean(x, dim=(0, 2, 3), keepdim=True, unbiased=False)
        self.seen.mul_(0.9).add_(0.1 * mean.detach().flatten())
        return (x - mean) / var.sqrt() * self.weight[:, None, None]


class Net(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.input_norm = InputNorm(3)
        self.features = nn.Sequential(block(3, 8), nn.MaxPool2d(2), block(8, 16), nn.AdaptiveAvgPool2d(1))
        self.classifier = nn.Linear(16, classes)

    def forward(self, x):
        x = self.features(self.input_norm(x)).flatten(1)
        return self.classifier(x)


class Loader:
    def __init__(self, n, size):
        self.n, self.size = n, size
        self.g = torch.Generator().manual_seed(21)

    def __iter__(self):
        for i in range(self.n):
            x = torch.rand(self.size, 3, 8, 8, generator=self.g)
            y = torch.randint(0, 4, (self.size,), generator=self.g)
            if i == 9:
                x[:, 2] = 0.5
            yield x, y


torch.manual_seed(0)
model = Net()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
model.train()
running = 0.0
for i, (inputs, labels) in enumerate(Loader(16, 8)):
    optimizer.zero_grad()
    outputs = model(inputs)
    loss = criterion(outputs, labels)
    loss.backward()
    optimizer.step()
    running += loss.item()
    if i % 4 == 3:
        print(f"[{i + 1}] loss: {running / 4:.3f}")
        running = 0.0
