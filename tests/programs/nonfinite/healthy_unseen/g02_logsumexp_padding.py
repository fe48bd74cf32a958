"""Multiple-instance learning: bags are padded with -inf before a logsumexp."""
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence


def bags(step):
    g = torch.Generator().manual_seed(step)
    sizes = torch.randint(1, 7, (16,), generator=g)
    items = [torch.randn(int(n), 6, generator=g) for n in sizes]
    label = torch.tensor([float((b[:, 0] > 1).any()) for b in items])
    return items, sizes, label


torch.manual_seed(1)
scorer = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))
opt = torch.optim.Adam(scorer.parameters(), lr=5e-3)
bce = nn.BCEWithLogitsLoss()
for step in range(60):
    items, sizes, label = bags(step)
    scores = scorer(torch.cat(items)).squeeze(1).split(sizes.tolist())
    padded = pad_sequence(list(scores), batch_first=True, padding_value=float("-inf"))
    logit = torch.logsumexp(padded, dim=1) - sizes.float().log()
    loss = bce(logit, label)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 20 == 0:
        print(step, loss.item())
