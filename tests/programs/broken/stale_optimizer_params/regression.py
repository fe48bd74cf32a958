# 4-fold cross-validation of a small regressor
import torch
import torch.nn as nn

torch.set_num_threads(1)
torch.manual_seed(2)

n, d = 800, 6
X = torch.randn(n, d)
w = torch.tensor([1.5, -2.0, 0.7, 0.0, 3.0, -1.0])
y = (X @ w + torch.sin(3 * X[:, 0]) + 0.1 * torch.randn(n)).unsqueeze(1)


def build():
    return nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))


model = build()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
criterion = nn.MSELoss()

scores = []
for fold in range(4):
    held = torch.zeros(n, dtype=torch.bool)
    held[fold * 200:(fold + 1) * 200] = True
    model = build()
    for epoch in range(6):
        for xb, yb in zip(X[~held].split(40), y[~held].split(40)):
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        scores.append(criterion(model(X[held]), y[held]).item())
    print(f"fold {fold}: val mse {scores[-1]:.3f}")

print(f"final cv_mse {sum(scores) / len(scores):.3f}")
