"""Which of the sensors is broken? Transformer over sensors, ReLU projection in front."""
import torch
import torch.nn as nn


class SensorNet(nn.Module):
    def __init__(self, sensors=6, window=10, dim=24):
        super().__init__()
        self.project = nn.Linear(window, dim)
        self.place = nn.Parameter(torch.randn(sensors, dim) * 0.2)
        self.encoder = nn.TransformerEncoderLayer(dim, 4, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.score = nn.Linear(dim, 1)

    def reset_parameters(self, shift):
        nn.init.xavier_uniform_(self.project.weight)
        nn.init.constant_(self.project.bias, shift)

    def forward(self, x):
        h = torch.relu(self.project(x)) + self.place
        return self.score(self.encoder(h)).squeeze(-1)


def readings(n, sensors=6, window=10):
    wave = torch.randn(n, 1, window).cumsum(2) * 0.3
    x = wave + 0.1 * torch.randn(n, sensors, window)
    broken = torch.randint(0, sensors, (n,))
    x[torch.arange(n), broken] = torch.randn(n, window) * 0.3
    return x.clamp(-3, 3), broken


def train(steps=250):
    model = SensorNet()
    model.reset_parameters(shift=-12.0)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    for i in range(steps):
        x, broken = readings(48)
        loss = nn.functional.cross_entropy(model(x), broken)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if i % 50 == 0:
            print(f"{i:4d} {loss.item():.4f}")
    return model


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    trained = train()
    x, broken = readings(1000)
    with torch.no_grad():
        print(f"final acc {(trained(x).argmax(1) == broken).float().mean().item():.3f}")
