# Predict systolic blood pressure (mmHg) from a few measurements; targets are not normalised.
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)

n = 2400
age = 20 + 60 * torch.rand(n)
bmi = 25 + 4 * torch.randn(n)
salt = 4 + 8 * torch.rand(n)
smoker = (torch.rand(n) < 0.3).float()
pressure = 118 + 0.6 * (age - 20) + 1.3 * (bmi - 25).clamp(min=-3) + 1.2 * salt + 10 * smoker * (age > 45) + 4 * torch.randn(n)

features = torch.stack([(age - 50) / 17, (bmi - 25) / 4, (salt - 8) / 2.3, smoker], dim=1)
train_ds = TensorDataset(features[:2000], pressure[:2000].unsqueeze(1))
val_x, val_y = features[2000:], pressure[2000:].unsqueeze(1)

model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(model.parameters(), lr=0.01)
mse = nn.MSELoss()

for epoch in range(12):
    model.train()
    for xb, yb in DataLoader(train_ds, batch_size=50, shuffle=True):
        opt.zero_grad()
        loss = mse(model(xb), yb)
        loss.backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        val = mse(model(val_x), val_y).item()
    print(f"epoch {epoch} train mse {loss.item():.1f} val mse {val:.1f}")

r2 = 1 - val / val_y.var(unbiased=False).item()
print(f"final val_r2 {r2:.3f} rmse {val ** 0.5:.2f}")
