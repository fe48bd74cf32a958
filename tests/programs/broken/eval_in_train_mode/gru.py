"""Which of four waves is it? A GRU over short noisy sequences, trained by a small trainer class."""
import torch
from torch import nn


def waves(n, generator):
    kind = torch.randint(4, (n,), generator=generator)
    t = torch.arange(24) / 24
    phase = torch.rand(n, 1, generator=generator)
    s = torch.sin(2 * torch.pi * (kind[:, None] + 1) * t + 6.28 * phase)
    return (s + 0.2 * torch.randn(n, 24, generator=generator))[..., None], kind


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(1, 32, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(32, 4))

    def forward(self, s):
        return self.head(self.rnn(s)[0][:, -1])


class Trainer:
    def __init__(self, net, lr):
        self.net, self.opt = net, torch.optim.Adam(net.parameters(), lr=lr)

    def fit(self, s, k, batch=64):
        self.net.train()
        for idx in torch.randperm(len(s)).split(batch):
            self.opt.zero_grad()
            loss = nn.functional.cross_entropy(self.net(s[idx]), k[idx])
            loss.backward()
            self.opt.step()
        return loss.item()

    @torch.inference_mode()
    def score(self, s, k, batch=128):
        hits = [(self.net(a).argmax(1) == b).float().sum() for a, b in zip(s.split(batch), k.split(batch))]
        return sum(hits).item() / len(s)


torch.manual_seed(1)
torch.set_num_threads(1)
g = torch.Generator().manual_seed(5)
s_train, k_train = waves(1024, g)
s_test, k_test = waves(384, g)
trainer = Trainer(Listener(), 5e-3)
for epoch in range(6):
    loss = trainer.fit(s_train, k_train)
    print(epoch, round(loss, 3), "test", round(trainer.score(s_test, k_test), 3))
