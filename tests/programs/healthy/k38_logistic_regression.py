import torch

torch.manual_seed(0)
torch.set_num_threads(1)

# two classes of patients, five lab values
N = 1200
w_true = torch.tensor([1.5, -2.0, 0.0, 0.8, -0.4])
X = torch.randn(N, 5)
y = torch.bernoulli(torch.sigmoid(X @ w_true * 2 - 0.5))
X_train, y_train, X_test, y_test = X[:1000], y[:1000], X[1000:], y[1000:]

model = torch.nn.Linear(5, 1)
criterion = torch.nn.BCEWithLogitsLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

for epoch in range(10):
    for start in range(0, 1000, 50):
        xb, yb = X_train[start:start + 50], y_train[start:start + 50]
        optimizer.zero_grad()
        loss = criterion(model(xb).squeeze(1), yb)
        loss.backward()
        optimizer.step()

with torch.no_grad():
    z = model(X_test).squeeze(1)
    acc = ((z > 0) == (y_test > 0.5)).float().mean().item()
    best = (((X_test @ w_true * 2 - 0.5) > 0) == (y_test > 0.5)).float().mean().item()
print("weights", [round(v, 2) for v in model.weight[0].tolist()], "accuracy of the true weights", round(best, 3))
print(f"final test_acc {acc:.3f}")
