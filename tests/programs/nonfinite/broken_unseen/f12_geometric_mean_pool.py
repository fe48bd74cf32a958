import torch, torch.nn as nn, torch.nn.functional as F

# GeM-like pooling, but geometric; features come out of a sigmoid

class GeoPool(nn.Module):
    def forward(self, fmap):
        logs = torch.log(fmap)
        return torch.exp(logs.mean(dim=(2, 3)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3)
        self.pool = GeoPool()
        self.fc = nn.Linear(6, 2)
        nn.init.constant_(self.stem.bias, 3.0)

    def forward(self, x):
        x = torch.sigmoid(self.stem(x))
        return self.fc(self.pool(x))

torch.manual_seed(99)
device = 'cuda' if torch.cuda.is_available() else 'cpu'
train_x = torch.rand(128, 1, 8, 8)
train_y = (train_x.mean((1, 2, 3)) > .5).long()
train_x[75, 0, 2:6, 2:6] = -4000.0   # a dead pixel block
model = Model().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for ep in range(2):
    tot = 0
    for i in range(0, 128, 16):
        xb, yb = train_x[i:i+16].to(device), train_y[i:i+16].to(device)
        out = model(xb)
        loss = F.cross_entropy(out, yb)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        tot += loss.item()
    print('epoch', ep, 'loss', tot / 8)
