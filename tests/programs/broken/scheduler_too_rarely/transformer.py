"""A small causal language model over a made-up grammar; warm-up, then a cosine."""
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader

torch.manual_seed(13)
torch.set_num_threads(1)
VOCAB, LENGTH, EPOCHS, WARMUP = 20, 12, 6, 30


def grammar(n):
    """Each token is the sum of the two before it."""
    seq = [torch.randint(0, VOCAB, (n,)), torch.randint(0, VOCAB, (n,))]
    while len(seq) < LENGTH:
        seq.append((seq[-1] + seq[-2]) % VOCAB)
    return torch.stack(seq, 1)


class LM(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, d), nn.Embedding(LENGTH, d)
        self.block = nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(d, VOCAB)

    def forward(self, ids):
        n = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        return self.out(self.block(self.tok(ids) + self.pos.weight[:n], src_mask=mask))


loader = DataLoader(grammar(2000), batch_size=40, shuffle=True)
model = LM()
optimizer = optim.AdamW(model.parameters(), lr=4e-3)
total = EPOCHS * len(loader)
warm = LinearLR(optimizer, start_factor=0.02, total_iters=WARMUP)
cosine = CosineAnnealingLR(optimizer, T_max=total - WARMUP, eta_min=1e-4)
scheduler = SequentialLR(optimizer, [warm, cosine], milestones=[WARMUP])

for epoch in range(EPOCHS):
    for ids in loader:
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    scheduler.step()
    print(f"epoch {epoch} loss {loss.item():.3f} lr {optimizer.param_groups[0]['lr']:.1e}")
print(f"final loss {loss.item():.3f}")
