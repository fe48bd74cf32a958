"""Copy task with the schedule of 'Attention is all you need'."""
import torch
import torch.nn as nn

torch.manual_seed(0)
torch.set_num_threads(1)

VOCAB, SEQ, D_MODEL, WARMUP_STEPS = 14, 7, 32, 60


def noam(step):
    step = step + 1
    return D_MODEL ** -0.5 * min(step ** -0.5, step * WARMUP_STEPS ** -1.5)


class CopyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.src = nn.Embedding(VOCAB, D_MODEL)
        self.pos = nn.Embedding(SEQ, D_MODEL)
        self.transformer = nn.Transformer(
            D_MODEL, nhead=4, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=64, dropout=0.0, batch_first=True
        )
        self.generator = nn.Linear(D_MODEL, VOCAB)

    def forward(self, src, tgt):
        p = self.pos(torch.arange(SEQ))
        mask = nn.Transformer.generate_square_subsequent_mask(SEQ)
        h = self.transformer(self.src(src) + p, self.src(tgt) + p, tgt_mask=mask, tgt_is_causal=True)
        return self.generator(h)


def data(batch):
    body = torch.randint(1, VOCAB, (batch, SEQ))
    return body, torch.cat([torch.zeros(batch, 1, dtype=torch.long), body[:, :-1]], 1)


model = CopyModel()
optimizer = torch.optim.Adam(model.parameters(), lr=0, betas=(0.9, 0.98), eps=1e-9)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=noam)
criterion = nn.CrossEntropyLoss()

for step in range(240):
    src, shifted = data(40)
    out = model(src, shifted)
    loss = criterion(out.view(-1, VOCAB), src.view(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if step % 60 == 0:
        print(f"step {step} loss {loss.item():.3f}")

print(f"final loss {loss.item():.4f}")
