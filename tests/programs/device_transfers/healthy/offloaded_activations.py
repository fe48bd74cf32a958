"""What backward needs waits for it on the CPU, so that the device has more room."""
import torch
from torch import nn

device = "simulated"
torch.manual_seed(0)


def out_of_the_way(tensor):
    return tensor.device, tensor.cpu()


def back_again(kept):
    home, tensor = kept
    return tensor.to(home)


net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for step in range(10):
    x = torch.randn(32, 16)
    with torch.autograd.graph.saved_tensors_hooks(out_of_the_way, back_again):
        loss = nn.functional.cross_entropy(net(x.to(device)), x[:, :4].argmax(1).to(device))
    opt.zero_grad()
    loss.backward()
    opt.step()
print(f"loss {loss.item():.3f}")
