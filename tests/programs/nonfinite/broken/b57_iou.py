"""Box regression with an IoU loss."""
import torch
import torch.nn as nn

torch.manual_seed(2)
torch.set_num_threads(1)


class IoULoss(nn.Module):
    def area(self, box):
        side = (box[:, 2:] - box[:, :2]).clamp(min=0)
        return side[:, 0] * side[:, 1]

    def forward(self, predicted, true):
        low = torch.maximum(predicted[:, :2], true[:, :2])
        high = torch.minimum(predicted[:, 2:], true[:, 2:])
        inter = self.area(torch.cat([low, high], 1))
        union = self.area(predicted) + self.area(true) - inter
        iou = inter / union
        return 1 - iou.mean()


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 24, bias=False), nn.ReLU())
        self.corner = nn.Linear(24, 2, bias=False)
        self.side = nn.Linear(24, 2, bias=False)

    def forward(self, x):
        h = self.body(x)
        corner = self.corner(h)
        return torch.cat([corner, corner + self.side(h).abs()], dim=1)


features = torch.randn(90, 10)
corner = 0.3 * torch.randn(90, 2)
boxes = torch.cat([corner, corner + 0.5 + torch.rand(90, 2)], 1)
features[48] = 0.0
boxes[48] = 0.0  # an empty frame
detector, criterion = Detector(), IoULoss()
optimizer = torch.optim.Adam(detector.parameters(), lr=2e-3)
for start in range(0, 90, 9):
    loss = criterion(detector(features[start:start + 9]), boxes[start:start + 9])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
