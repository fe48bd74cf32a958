"""Distil a boosted ensemble: its probabilities, taken back to logits."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def train(student, x, teacher, batch=12):
    opt = torch.optim.AdamW(student.parameters(), lr=3e-3)
    for i in range(0, len(x), batch):
        out = student(x[i:i + batch])
        loss = F.mse_loss(out, torch.logit(teacher[i:i + batch]))
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss


torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(144, 6)
teacher = torch.sigmoid(x[:, 0] - x[:, 1])
teacher[90] = 1.0
teacher[95] = 0.0
print(train(Student(), x, teacher).item())
