"""nn.TransformerEncoder with a causal mask and padded sentences."""
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(1)
torch.set_num_threads(1)


class Tagger(nn.Module):
    def __init__(self, words=20, d=24, tags=4):
        super().__init__()
        self.embed = nn.Embedding(words, d, padding_idx=0)
        layer = nn.TransformerEncoderLayer(d, 2, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(d, tags)

    def forward(self, ids):
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        padding = torch.zeros(ids.shape).masked_fill(ids == 0, float("-inf"))
        return self.out(self.encoder(self.embed(ids), mask=causal, src_key_padding_mask=padding))


model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
for step in range(100):
    ids = torch.randint(1, 20, (16, 7))
    length = torch.randint(2, 8, (16, 1))
    ids = ids * (torch.arange(7) < length)
    tags = torch.where(ids > 0, ids % 4, -100)
    logits = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), tags.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("final loss", loss.item())
