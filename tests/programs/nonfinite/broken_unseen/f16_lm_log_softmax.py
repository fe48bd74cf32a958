"""Language model with dict outputs; log-softmax by hand. Document 5 of a batch has a broken feature."""
import torch
from torch import nn


class Config:
    vocab_size = 40
    hidden_size = 24
    max_len = 10


class LMForPretraining(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.side = nn.Linear(1, config.hidden_size, bias=False)
        self.rnn = nn.Linear(config.hidden_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, popularity, labels=None):
        h = self.wte(input_ids) + self.side(popularity)[:, None]
        logits = self.lm_head(h + self.rnn(h).tanh())
        loss = None
        if labels is not None:
            log_z = logits.exp().sum(-1).log()
            picked = logits.gather(-1, labels[..., None]).squeeze(-1)
            loss = (log_z - picked).mean()
        return {"loss": loss, "logits": logits}


def collate(i, g):
    ids = torch.randint(0, Config.vocab_size, (12, Config.max_len + 1), generator=g)
    popularity = torch.rand(12, 1, generator=g)
    if i == 13:
        popularity[5] = 4000.0
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "popularity": popularity}


def main():
    torch.manual_seed(0)
    model = LMForPretraining(Config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(1)
    for step in range(20):
        batch = collate(step, g)
        outputs = model(**batch)
        outputs["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print({"step": step, "loss": outputs["loss"].item()})


main()
