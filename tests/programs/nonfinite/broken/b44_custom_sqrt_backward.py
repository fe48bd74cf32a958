"""A hand-written autograd function for |x|^(1/2)."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class RootAbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        root = x.abs().sqrt()
        ctx.save_for_backward(x, root)
        return root

    @staticmethod
    def backward(ctx, grad_output):
        x, root = ctx.saved_tensors
        return grad_output * torch.sign(x) / (2 * root)


class RootNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 20, bias=False)
        self.second = nn.Linear(20, 1)

    def forward(self, x):
        return self.second(RootAbs.apply(self.first(x)))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(100, 6)
    y = x[:, :1].abs().sqrt()
    x[63] = 0.0
    y[63] = 0.0
    model = RootNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for i in range(0, 100, 10):
        prediction = model(x[i:i + 10])
        loss = F.mse_loss(prediction, y[i:i + 10])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(loss.item())


main()
