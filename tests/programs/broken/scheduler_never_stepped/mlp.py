import torch
import torch.nn.functional as F

torch.manual_seed(9)
torch.set_num_threads(1)

angle = torch.rand(2000) * 9
side = torch.randint(0, 2, (2000,))
spiral = torch.stack([angle * torch.cos(angle + 3.14159 * side), angle * torch.sin(angle + 3.14159 * side)], 1) / 9
spiral = spiral + 0.02 * torch.randn_like(spiral)


class Net(torch.nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.a = torch.nn.Linear(2, 64)
        self.b = torch.nn.Linear(64, 64)
        self.c = torch.nn.Linear(64, 2)

    def forward(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


net = Net()
opt = torch.optim.RMSprop(net.parameters(), lr=2e-3)
lr_decay = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)

for epoch in range(15):
    for idx in torch.randperm(1600).split(80):
        opt.zero_grad()
        loss = F.cross_entropy(net(spiral[idx]), side[idx])
        loss.backward()
        opt.step()
    print("epoch", epoch, "loss", round(loss.item(), 4))
with torch.no_grad():
    acc = (net(spiral[1600:]).argmax(1) == side[1600:]).float().mean().item()
print(f"final acc {acc:.3f}")
