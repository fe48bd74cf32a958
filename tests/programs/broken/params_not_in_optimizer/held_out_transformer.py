"""Character model with the usual split into decayed and not decayed parameters."""
import torch
from torch import nn
from torch.nn import functional as F

TEXT = (
    "the quick brown fox jumps over the lazy dog while the cat looks on and the rain falls on the plain "
    "and nobody in the house says a word about the weather or the time or the price of bread "
) * 6


class Block(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.qkv = nn.Linear(n_embd, 3 * n_embd)
        self.proj = nn.Linear(n_embd, n_embd)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))
        self.n_head = n_head

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.n_head, -1).transpose(1, 2) for z in self.qkv(self.ln_1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln_2(x))


class CharGPT(nn.Module):
    def __init__(self, vocab, n_embd=32, n_head=4, n_layer=2, block=24):
        super().__init__()
        self.wte = nn.Embedding(vocab, n_embd)
        self.wpe = nn.Embedding(block, n_embd)
        self.h = nn.ModuleList(Block(n_embd, n_head) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)
        for e in (self.wte, self.wpe):
            nn.init.normal_(e.weight, std=0.02)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))

    def configure_optimizers(self, lr, weight_decay):
        decay, no_decay = [], []
        for module in self.modules():
            if isinstance(module, nn.Linear):
                decay.append(module.weight)
                if module.bias is not None:
                    no_decay.append(module.bias)
            elif isinstance(module, nn.LayerNorm):
                no_decay += [module.weight, module.bias]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def main():
    torch.manual_seed(1337)
    torch.set_num_threads(1)
    chars = sorted(set(TEXT))
    ids = torch.tensor([chars.index(c) for c in TEXT])
    model = CharGPT(len(chars))
    optimizer = model.configure_optimizers(lr=3e-3, weight_decay=0.1)
    for it in range(160):
        at = torch.randint(0, len(ids) - 25, (24,))
        chunk = torch.stack([ids[a:a + 25] for a in at])
        logits = model(chunk[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, len(chars)), chunk[:, 1:].reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if it % 40 == 0:
            print(it, f"{loss.item():.4f}")
    print(f"final loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
