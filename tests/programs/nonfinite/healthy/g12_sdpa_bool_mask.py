"""F.scaled_dot_product_attention with a boolean mask; some sentences are empty."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, words=16, d=16):
        super().__init__()
        self.embed = nn.Embedding(words, d)
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, 4)

    def forward(self, ids, keep):
        x = self.embed(ids)
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :]).squeeze(1)
        return self.out((x + attended)[:, 0])


def main():
    torch.manual_seed(2)
    torch.set_num_threads(1)
    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(120):
        ids = torch.randint(0, 16, (24, 6))
        keep = torch.arange(6) < torch.randint(1, 7, (24, 1))
        y = ids[:, 0] % 4
        loss = F.cross_entropy(model(ids, keep), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("final loss", loss.item())


main()
