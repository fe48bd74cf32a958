"""Predict the next value of a logistic map; settings come from a JSON text."""
import json

import torch
from torch import nn

SETTINGS = json.loads("""
{"seed": 1, "hidden": 32, "layers": 1, "optimizer": {"name": "RMSprop", "lr": 0.4, "lr_scale": 0.01},
 "batch": 50, "epochs": 10}
""")

torch.manual_seed(SETTINGS["seed"])
torch.set_num_threads(1)

x = torch.empty(1200)
x[0] = 0.37
for i in range(1199):
    x[i + 1] = 3.8 * x[i] * (1 - x[i])
windows = x.unfold(0, 9, 1)
inputs, targets = windows[:, :8, None], windows[:, 8:]


class Model(nn.Module):
    def __init__(self, hidden, layers):
        super().__init__()
        self.core = nn.LSTM(1, hidden, layers, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, seq):
        return self.out(self.core(seq)[0][:, -1])


model = Model(SETTINGS["hidden"], SETTINGS["layers"])
o = SETTINGS["optimizer"]
lr = round(o["lr"] * o["lr_scale"], 2)
optimizer = getattr(torch.optim, o["name"])(model.parameters(), lr=lr)
mse = nn.MSELoss()

for epoch in range(SETTINGS["epochs"]):
    order = torch.randperm(1000)
    running = 0.0
    for idx in order.split(SETTINGS["batch"]):
        optimizer.zero_grad()
        loss = mse(model(inputs[idx]), targets[idx])
        loss.backward()
        optimizer.step()
        running += loss.item()
    print(epoch, running / 20)

with torch.no_grad():
    print("final test_mse", round(mse(model(inputs[1000:]), targets[1000:]).item(), 5))
