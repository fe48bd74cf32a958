"""Sentences of words, a model that is given the labels too and computes its loss itself."""
import torch
from torch import nn
from torch.utils.data import DataLoader

WORDS = ["good", "bad", "film", "the", "a", "was", "rather", "very", "plot", "actor"]
vocabulary = {word.upper(): number for number, word in enumerate(WORDS, 1)}


def sentences(n, generator):
    for _ in range(n):
        words = [WORDS[i] for i in torch.randint(2, 10, (8,), generator=generator).tolist()]
        label = int(torch.randint(0, 2, (1,), generator=generator))
        words[int(torch.randint(0, 8, (1,), generator=generator))] = WORDS[label]
        yield words, label


def collate(rows):
    ids = [[vocabulary.get(word, 0) for word in words] for words, _ in rows]
    return {"input_ids": torch.tensor(ids), "mask": torch.ones(len(rows), 8), "labels": torch.tensor([label for _, label in rows])}


class Classifier(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(len(WORDS) + 1, width)
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, input_ids, mask, labels):
        h = (self.inner(self.embed(input_ids)).relu() * mask[..., None]).sum(1)
        logits = self.head(h)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = list(sentences(960, torch.Generator().manual_seed(1)))
    loader = DataLoader(data, batch_size=32, shuffle=True, collate_fn=collate)
    model = Classifier()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(4):
        hits = 0
        for batch in loader:
            out = model(**batch)
            opt.zero_grad()
            out["loss"].backward()
            opt.step()
            hits += (out["logits"].argmax(1) == batch["labels"]).sum().item()
        print(epoch, f"{out['loss'].item():.3f}", f"{hits / len(data):.3f}")


main()
