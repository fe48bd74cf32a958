"""Linear regression on raw units with a brave learning rate."""
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
area = torch.rand(64, 2) * 300
price = area @ torch.tensor([[1500.0], [-200.0]])
model = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(12):
    optimizer.zero_grad()
    predicted = model(area)
    loss = F.mse_loss(predicted, price)
    loss.backward()
    optimizer.step()
    print(epoch, loss.item())
