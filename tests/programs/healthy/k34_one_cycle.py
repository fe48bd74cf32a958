"""Train with the one-cycle policy: the schedule moves after every batch."""
import argparse
import pathlib

import numpy as np
import torch
import torch.nn as nn
import torch.utils.data as tud


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--max-lr", type=float, default=2e-2)
    p.add_argument("--epochs", type=int, default=7)
    p.add_argument("--bs", type=int, default=32)
    p.add_argument("--seed", type=int, default=99)
    return p.parse_args()


def digits():
    npz = np.load(pathlib.Path(__file__).parent.parent / "data" / "digits.npz")
    return tud.TensorDataset(torch.from_numpy(npz["images"] / np.float32(16)).flatten(1), torch.from_numpy(npz["labels"]).long())


def main():
    args = get_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    train, valid = tud.random_split(digits(), [0.8, 0.2])
    train_dl = tud.DataLoader(train, args.bs, shuffle=True, drop_last=True)
    valid_dl = tud.DataLoader(valid, 4 * args.bs)

    model = nn.Sequential(nn.Linear(64, 80), nn.BatchNorm1d(80), nn.ReLU(), nn.Dropout(0.2), nn.Linear(80, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.max_lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.max_lr, epochs=args.epochs, steps_per_epoch=len(train_dl))
    criterion = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        model.train()
        for x, y in train_dl:
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        model.eval()
        right = total = 0
        with torch.no_grad():
            for x, y in valid_dl:
                right += (model(x).argmax(1) == y).sum().item()
                total += len(y)
        print(f"epoch {epoch} lr {optimizer.param_groups[0]['lr']:.2e} loss {loss.item():.3f} valid {right / total:.3f}")
    print(f"final valid_acc {right / total:.3f}")


if __name__ == "__main__":
    main()
