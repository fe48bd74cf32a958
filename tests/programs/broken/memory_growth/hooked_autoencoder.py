import torch
from torch import nn


class Recorder:
    """Looks at what a layer puts out."""

    def __init__(self, layer):
        self.seen = []
        layer.register_forward_hook(self.remember)

    def remember(self, module, args, output):
        self.seen.append(output.detach().clone())

    def mean(self):
        return self.seen[-1].mean().item()


class Autoencoder(nn.Module):
    def __init__(self, width=384):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(48, width), nn.Tanh())
        self.decoder = nn.Linear(width, 48)

    def forward(self, x):
        return self.decoder(self.encoder(x))


def main():
    torch.manual_seed(1)
    torch.set_num_threads(1)
    basis = torch.randn(6, 48)
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    recorder = Recorder(model.encoder)
    for step in range(220):
        x = torch.randn(256, 6) @ basis
        loss = nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(step, round(loss.item(), 3), round(recorder.mean(), 3))


main()
