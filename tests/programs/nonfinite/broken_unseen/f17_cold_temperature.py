import torch
import torch.nn as nn


def soft_labels(y, classes):
    return torch.eye(classes)[y]


class DistillLoss(nn.Module):
    """Cross entropy from probabilities; the temperature is annealed."""

    def __init__(self, start=1.0, decay=0.7):
        super().__init__()
        self.t = start
        self.decay = decay

    def anneal(self):
        self.t *= self.decay

    def forward(self, scores, target):
        p = torch.softmax(scores / self.t, dim=1)
        logp = torch.log(p)
        return -(target * logp).sum(1).mean()


class Experiment:
    def __init__(self, seed=6):
        torch.manual_seed(seed)
        self.x = torch.randn(200, 10)
        self.y = (self.x @ torch.randn(10, 5)).argmax(1)
        self.student = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 5))
        self.criterion = DistillLoss()
        self.opt = torch.optim.Adam(self.student.parameters(), lr=5e-3)

    def epoch(self):
        for idx in torch.randperm(200).split(25):
            loss = self.criterion(self.student(self.x[idx]), soft_labels(self.y[idx], 5))
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
        self.criterion.anneal()
        return loss.item()

    def run(self, epochs):
        for e in range(epochs):
            print("epoch", e, "T", round(self.criterion.t, 4), "loss", self.epoch())


Experiment().run(14)
