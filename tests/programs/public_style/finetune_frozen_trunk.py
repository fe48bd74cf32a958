"""Transfer learning: a convolutional network is trained on one task, its trunk is frozen, and a new head is trained on another."""
import argparse
import atexit
import copy
import hashlib
import os
import random

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    """12x12 pictures of bars and crosses. Task 0: which of four shapes; task 1: in which half is it."""

    def __init__(self, n, task, augment):
        self.augment = augment
        self.labels = torch.randint(4 if task == 0 else 2, (n,))
        self.images = 0.15 * torch.randn(n, 3, 12, 12)
        for i, label in enumerate(self.labels.tolist()):
            shape = label if task == 0 else random.randrange(4)
            x = random.randrange(1, 8) if task == 0 else (random.randrange(0, 3) if label == 0 else random.randrange(6, 8))
            y = random.randrange(1, 8)
            if shape in (0, 2):
                self.images[i, :, y + 1, x:x + 4] += 1.0
            if shape in (1, 2):
                self.images[i, :, y:y + 4, x + 1] += 1.0
            if shape == 3:
                self.images[i, :, y:y + 3, x:x + 3] += 1.0

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment and np.random.rand() < 0.5:
            image = image.flip(1)
        return image, self.labels[index]


class ConvNet(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        )
        self.fc = nn.Linear(32 * 9, num_classes)

    def forward(self, x):
        return self.fc(torch.flatten(self.features(x), 1))


def train_model(model, dataloaders, criterion, optimizer, scheduler, num_epochs, path):
    best_acc = 0.0
    torch.save(model.state_dict(), path)
    for epoch in range(num_epochs):
        print(f"Epoch {epoch}/{num_epochs - 1}")
        print("-" * 10)
        # Each epoch has a training and validation phase
        for phase in ["train", "val"]:
            if phase == "train":
                model.train()  # Set model to training mode
            else:
                model.eval()  # Set model to evaluate mode
            running_loss = 0.0
            running_corrects = 0
            for inputs, labels in dataloaders[phase]:
                optimizer.zero_grad()
                # track history if only in train
                with torch.set_grad_enabled(phase == "train"):
                    outputs = model(inputs)
                    _, preds = torch.max(outputs, 1)
                    loss = criterion(outputs, labels)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                running_loss += loss.item() * inputs.size(0)
                running_corrects += torch.sum(preds == labels.data)
            if phase == "train":
                scheduler.step()
            size = len(dataloaders[phase].dataset)
            epoch_acc = running_corrects.double() / size
            print(f"{phase} Loss: {running_loss / size:.4f} Acc: {epoch_acc:.4f}")
            if phase == "val" and epoch_acc > best_acc:
                best_acc = epoch_acc
                torch.save(model.state_dict(), path)
        print()
    print(f"Best val Acc: {best_acc:4f}")
    model.load_state_dict(torch.load(path, weights_only=True))
    return model


def loaders(task, args):
    sets = {"train": Shapes(args.samples, task, augment=True), "val": Shapes(args.samples // 4, task, augment=False)}
    return {x: DataLoader(sets[x], batch_size=args.batch_size, shuffle=x == "train") for x in sets}


def show_generators():
    states = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    print("generators", hashlib.sha256(repr(states).encode()).hexdigest())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=1200)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random.seed(args.seed), np.random.seed(args.seed), torch.manual_seed(args.seed)
    atexit.register(show_generators)
    os.makedirs("checkpoints", exist_ok=True)
    criterion = nn.CrossEntropyLoss()

    model = ConvNet(4)
    optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    model = train_model(model, loaders(0, args), criterion, optimizer, scheduler, args.epochs, "checkpoints/pretrained.pt")

    model_conv = copy.deepcopy(model)
    for param in model_conv.parameters():
        param.requires_grad = False
    # Parameters of newly constructed modules have requires_grad=True by default
    model_conv.fc = nn.Linear(model_conv.fc.in_features, 2)
    optimizer_conv = optim.SGD(model_conv.fc.parameters(), lr=0.01, momentum=0.9)
    exp_lr_scheduler = lr_scheduler.StepLR(optimizer_conv, step_size=2, gamma=0.1)
    model_conv = train_model(model_conv, loaders(1, args), criterion, optimizer_conv, exp_lr_scheduler, args.epochs, "checkpoints/tuned.pt")
    torch.save(model_conv, "checkpoints/whole_model.pt")
    show_generators()


if __name__ == "__main__":
    main()
