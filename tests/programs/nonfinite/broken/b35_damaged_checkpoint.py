"""Fine-tune from a checkpoint (kept in memory here)."""
import io

import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


def pretrained_weights():
    torch.manual_seed(100)
    state = Net().state_dict()
    state["encoder.2.weight"][5, 7] = float("nan")  # a diverged run saved its last state
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Net()
    model.load_state_dict(pretrained_weights())
    opt = torch.optim.Adam(model.parameters(), lr=1e-4)
    x = torch.randn(80, 8)
    y = x[:, :3].argmax(1)
    for i in range(0, 80, 16):
        out = model(x[i:i + 16])
        loss = F.cross_entropy(out, y[i:i + 16])
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(loss.item())


main()
