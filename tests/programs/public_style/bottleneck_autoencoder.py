"""Autoencoder with a bottleneck of three tanh units, as in many tutorials; the pictures are curved strokes."""
import argparse
import atexit
import hashlib
import os
import random

import numpy as np
import torch
import torch.nn as nn
import torch.utils.data as Data


class AutoEncoder(nn.Module):
    def __init__(self, pixels):
        super(AutoEncoder, self).__init__()
        self.encoder = nn.Sequential(
            nn.Linear(pixels, 128),
            nn.Tanh(),
            nn.Linear(128, 64),
            nn.Tanh(),
            nn.Linear(64, 12),
            nn.Tanh(),
            nn.Linear(12, 3),  # compress to 3 features which can be visualized in plt
        )
        self.decoder = nn.Sequential(
            nn.Linear(3, 12),
            nn.Tanh(),
            nn.Linear(12, 64),
            nn.Tanh(),
            nn.Linear(64, 128),
            nn.Tanh(),
            nn.Linear(128, pixels),
            nn.Sigmoid(),  # compress to a range (0, 1)
        )

    def forward(self, x):
        encoded = self.encoder(x)
        decoded = self.decoder(encoded)
        return encoded, decoded


def strokes(n, size=20):
    """Bright curves on a dark ground, as in pictures of digits: nine tenths of the pixels are nearly zero."""
    y, x = np.mgrid[0:size, 0:size] / size - 0.5
    angle, bend, shift = np.random.uniform(0, np.pi, (n, 1, 1)), np.random.uniform(-2, 2, (n, 1, 1)), np.random.uniform(-0.15, 0.15, (n, 1, 1))
    along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    return (np.exp(-300 * (across - shift - bend * along**2) ** 2) * (np.abs(along) < 0.35)).astype(np.float32)


def rng_state():
    digest = hashlib.sha1()
    digest.update(torch.get_rng_state().numpy())
    digest.update(np.random.get_state()[1])
    digest.update(str(random.getstate()).encode())
    return digest.hexdigest()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--num_samples", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    atexit.register(lambda: print("rng at exit:", rng_state()))

    train_data = torch.from_numpy(strokes(args.num_samples)).flatten(1)
    train_loader = Data.DataLoader(dataset=train_data, batch_size=args.batch_size, shuffle=True)
    view_data = train_data[:200]
    autoencoder = AutoEncoder(train_data.size(1))
    optimizer = torch.optim.Adam(autoencoder.parameters(), lr=args.lr)
    loss_func = nn.MSELoss()
    os.makedirs("codes", exist_ok=True)

    for epoch in range(args.epochs):
        for step, x in enumerate(train_loader):
            encoded, decoded = autoencoder(x)
            loss = loss_func(decoded, x)  # mean square error
            optimizer.zero_grad()  # clear gradients for this training step
            loss.backward()  # backpropagation, compute gradients
            optimizer.step()  # apply gradients
            if step % 32 == 0:
                print("Epoch: ", epoch, "| train loss: %.4f" % loss.data.numpy())
        with torch.no_grad():
            codes, _ = autoencoder(view_data)
        np.savetxt(f"codes/epoch_{epoch}.csv", codes.numpy(), fmt="%.9g")
    torch.save({"net": autoencoder.state_dict(), "opt": optimizer.state_dict()}, "autoencoder.pt")
    print("rng:", rng_state())


if __name__ == "__main__":
    main()
