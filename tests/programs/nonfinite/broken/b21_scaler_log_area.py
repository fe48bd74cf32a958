"""Box regression under autocast with a GradScaler."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class BoxHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4))
        self.size = nn.Linear(96, 2)

    def forward(self, image):
        return self.size(self.stem(image).flatten(1))


def size_loss(predicted, boxes):
    size = boxes[:, 2:] - boxes[:, :2]
    return F.smooth_l1_loss(predicted.float(), torch.log(size))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images = torch.randn(120, 1, 8, 8)
    corner = torch.rand(120, 2)
    boxes = torch.cat([corner, corner + 0.1 + torch.rand(120, 2)], 1)
    boxes[64, 2] = boxes[64, 0]  # drawn with a single click
    loader = DataLoader(TensorDataset(images, boxes), batch_size=12, shuffle=False)
    model = BoxHead()
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for image, box in loader:
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = size_loss(model(image), box)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    print("loss", loss.item(), "scale", scaler.get_scale())


if __name__ == "__main__":
    main()
