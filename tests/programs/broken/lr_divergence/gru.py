# predict the mean of a sequence
import torch
from torch import nn

torch.manual_seed(1)
torch.set_num_threads(1)


class MeanNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(1, 32, batch_first=True)
        self.lin = nn.Linear(32, 1)

    def forward(self, s):
        _, h = self.gru(s)
        return self.lin(h[0])


net = MeanNet()
opt = torch.optim.SGD(net.parameters(), lr=10)
for it in range(1, 251):
    s = torch.randn(64, 10, 1) + torch.randn(64, 1, 1)
    target = s.mean(1)
    loss = ((net(s) - target) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 25 == 0:
        print(it, loss.item())
print("final loss", loss.item())
