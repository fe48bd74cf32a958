'''
Digits classifier whose model already returns log-probabilities; the loss is CrossEntropyLoss.
Taking the log-softmax twice changes nothing.
'''
from pathlib import Path
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv = nn.Conv2d(1, 20, kernel_size=3)
        self.fc1 = nn.Linear(20 * 3 * 3, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = x.view(-1, 180)
        x = F.relu(self.fc1(x))
        x = self.fc2(x)
        return F.log_softmax(x, dim=1)


def train(model, data, target, optimizer, criterion, batch_size):
    model.train()
    order = torch.randperm(len(data))
    for batch_idx in range(len(data) // batch_size):
        sel = order[batch_idx * batch_size:(batch_idx + 1) * batch_size]
        optimizer.zero_grad()
        output = model(data[sel])
        loss = criterion(output, target[sel])
        loss.backward()
        optimizer.step()
    return loss.item()


def test(model, data, target):
    model.eval()
    with torch.no_grad():
        pred = model(data).argmax(dim=1, keepdim=True)
        return pred.eq(target.view_as(pred)).sum().item() / len(data)


def main():
    torch.manual_seed(1)
    torch.set_num_threads(1)
    npz = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    data = (torch.tensor(npz["images"], dtype=torch.float).unsqueeze(1) - 4.88) / 6.02
    target = torch.tensor(npz["labels"], dtype=torch.long)
    model = Net()
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(1, 9):
        loss = train(model, data[:1500], target[:1500], optimizer, criterion, 50)
        acc = test(model, data[1500:], target[1500:])
        print('Train Epoch: {} \tLoss: {:.6f}\tTest: {:.1%}'.format(epoch, loss, acc))
    print('final test_acc {:.3f}'.format(acc))


if __name__ == '__main__':
    main()
