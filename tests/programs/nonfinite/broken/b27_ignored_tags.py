"""Part-of-speech tags with an LSTM; padding and unknown tags are not scored."""
import torch
import torch.nn as nn
import torch.nn.functional as F

PAD_TAG = -100


class Tagger(nn.Module):
    def __init__(self, words=50, tags=5):
        super().__init__()
        self.embed = nn.Embedding(words, 12)
        self.lstm = nn.LSTM(12, 16, batch_first=True, bidirectional=True)
        self.tag = nn.Linear(32, tags)

    def forward(self, sentence):
        return self.tag(self.lstm(self.embed(sentence))[0])


class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    def step(self, sentence, tags):
        self.optimizer.zero_grad()
        scores = self.model(sentence)
        loss = F.cross_entropy(scores.reshape(-1, 5), tags.reshape(-1), ignore_index=PAD_TAG)
        loss.backward()
        self.optimizer.step()
        return loss.item()


torch.manual_seed(0)
torch.set_num_threads(1)
sentences = torch.randint(0, 50, (120, 6))
tags = sentences % 5
tags[:, 5] = PAD_TAG
tags[72:80] = PAD_TAG  # the annotators have not come to these yet
trainer = Trainer(Tagger(), 5e-3)
for i in range(15):
    print(i, trainer.step(sentences[8 * i:8 * i + 8], tags[8 * i:8 * i + 8]))
