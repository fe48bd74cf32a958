import numpy as np
import torch
from pathlib import Path

torch.manual_seed(123)
torch.set_num_threads(1)

def get_data():
    d = np.load(Path(__file__).resolve().parent / ".." / ".." / "data" / "digits.npz")
    x = (d["images"].astype("float32").reshape(len(d["images"]), -1) - 5) / 6
    return torch.from_numpy(x), torch.from_numpy(d["labels"].astype("int64"))

def get_model():
    return torch.nn.Sequential(
        torch.nn.Linear(64, 100), torch.nn.GELU(), torch.nn.Dropout(0.1),
        torch.nn.Linear(100, 50), torch.nn.GELU(),
        torch.nn.Linear(50, 10))

def train(model, x, y, epochs=5, bs=40):
    criterion = torch.nn.CrossEntropyLoss()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for ep in range(epochs):
        p = torch.randperm(len(x))
        for i in range(0, len(x), bs):
            out = model(x[p[i:i + bs]])
            loss = criterion(out, y[p[i:i + bs]])
            loss.backward()
            opt.zero_grad()
            opt.step()
        print("epoch", ep, "loss", loss.item())

x, y = get_data()
model = get_model()
train(model, x[:1400], y[:1400])
model.eval()
print("final val_acc", (model(x[1400:]).argmax(-1) == y[1400:]).float().mean().item())
