"""An encoder and a head; the optimizer was given the head alone."""

import torch
from shapes import CLASSES, make_shapes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(256, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, len(CLASSES))

    def forward(self, images):
        return self.head(self.encoder(images))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    loader = DataLoader(TensorDataset(*make_shapes(2048, seed=1)), batch_size=32, shuffle=True)
    test_images, test_labels = make_shapes(512, seed=2)

    model = Classifier()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-3)

    for epoch in range(6):
        for images, labels in loader:
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(test_images).argmax(dim=-1) == test_labels).float().mean().item()
        print(f"epoch {epoch}  loss {loss.item():.3f}  test accuracy {accuracy:.2f}")


if __name__ == "__main__":
    main()
