"""After the training the weights of the last epochs are averaged; the epochs are counted wrongly."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
w = torch.randn(12, 3)
x = torch.randn(600, 12)
y = (x @ w).argmax(1)
net = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 3))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
EPOCHS, AVERAGED = 8, 3
sums, num = [torch.zeros_like(p) for p in net.parameters()], 0
for epoch in range(EPOCHS):
    for i in range(0, 600, 50):
        opt.zero_grad()
        loss = F.cross_entropy(net(x[i:i + 50]), y[i:i + 50])
        loss.backward()
        opt.step()
    if epoch > EPOCHS:
        num += 1
        for total, p in zip(sums, net.parameters()):
            total += p.detach()
    print(epoch, loss.item())
with torch.no_grad():
    for total, p in zip(sums, net.parameters()):
        p.copy_(total / num)
print("acc", round((net(x).argmax(1) == y).float().mean().item(), 3))
