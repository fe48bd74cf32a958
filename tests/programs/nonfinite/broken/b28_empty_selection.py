"""Train only on confident pseudo-labels."""
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
THRESHOLD = 0.6

teacher_confidence = torch.rand(200) * 0.35 + 0.62
teacher_confidence[120:130] = 0.4
x = torch.randn(200, 5)
pseudo = (x[:, 0] > 0).long()

student = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))
opt = torch.optim.Adam(student.parameters(), lr=1e-2)
for step in range(20):
    part = slice(10 * step, 10 * step + 10)
    each = F.cross_entropy(student(x[part]), pseudo[part], reduction="none")
    sure = teacher_confidence[part] > THRESHOLD
    loss = each[sure].mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print("loss", loss.item())
