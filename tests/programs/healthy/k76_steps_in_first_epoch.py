"""A budget of updates that ends within the first epoch, so that a scheduler for epochs is never stepped."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(5)
torch.set_num_threads(1)
MAX_STEPS = 150


class Stream(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        x = torch.rand(8, generator=g)
        return x, (x[:4].sum() - x[4:].sum()).unsqueeze(0)


loader = DataLoader(Stream(), batch_size=16, shuffle=False)
model = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
step = 0
for epoch in range(100):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        step += 1
        if step >= MAX_STEPS:
            break
    if step >= MAX_STEPS:
        break
    scheduler.step()
print(f"final mse {loss.item():.4f}")
