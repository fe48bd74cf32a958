"""Rare event detection trained on a soft F1 score."""
import torch
from torch import nn


def soft_f1_loss(prob, truth):
    hits = (prob * truth).sum()
    precision = hits / (prob.sum() + 1e-7)
    recall = hits / (truth.sum() + 1e-7)
    f1 = 2 * precision * recall / (precision + recall)
    return 1 - f1


def build_model():
    return nn.Sequential(
        nn.Linear(9, 24),
        nn.BatchNorm1d(24),
        nn.ReLU(),
        nn.Linear(24, 1),
        nn.Sigmoid(),
    )


def build_data():
    torch.manual_seed(10)
    x = torch.randn(256, 9)
    y = (x[:, 0] > 0.8).float()
    x[160:192, 0] = -x[160:192, 0].abs()
    y[160:192] = 0.0
    return x, y


def train():
    x, y = build_data()
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(3):
        model.train()
        for s in range(0, 256, 32):
            prob = model(x[s:s + 32]).squeeze(1)
            loss = soft_f1_loss(prob, y[s:s + 32])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.4f}")


train()
