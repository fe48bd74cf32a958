"""A small convolutional network learns to tell four shapes apart."""

import torch
import torch.nn.functional as F
from shapes import CLASSES, make_shapes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)

train = DataLoader(TensorDataset(*make_shapes(2048, seed=1)), batch_size=32, shuffle=True)
test_images, test_labels = make_shapes(512, seed=2)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(32 * 4 * 4, len(CLASSES)),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(4):
    model.train()
    for images, labels in train:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    model.eval()
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    print(f"epoch {epoch}  loss {loss.item():.3f}  test accuracy {accuracy:.2f}")
