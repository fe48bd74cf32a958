"""Sequence to sequence with attention: dates written in words are translated to digits. The decoder is a GRUCell whose state starts from zeros."""
import argparse
import atexit
import hashlib
import json
import logging
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

logging.basicConfig(format="%(levelname)s:%(name)s:%(message)s", level=logging.INFO)  # to stderr
log = logging.getLogger("seq2seq")

MONTHS = "january february march april may june july august september october november december".split()
PAD, SOS, EOS = 0, 1, 2
CHARS = "abcdefghijklmnopqrstuvwxyz0123456789 ,-"
VOCAB = {c: i + 3 for i, c in enumerate(CHARS)}


def make_pair(rng):
    day, month, year = rng.randint(1, 28), rng.randint(1, 12), rng.randint(1950, 2049)
    source = rng.choice([f"{day} {MONTHS[month - 1]} {year}", f"{MONTHS[month - 1][:3]} {day}, {year}", f"{day}-{month}-{year}"])
    return source, f"{year}-{month:02d}-{day:02d}"


def encode(text, length):
    ids = [VOCAB[c] for c in text] + [EOS]
    return ids + [PAD] * (length - len(ids))


class Encoder(nn.Module):
    def __init__(self, vocab, hidden):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden, padding_idx=PAD)
        self.gru = nn.GRU(hidden, hidden // 2, batch_first=True, bidirectional=True)

    def forward(self, source):
        outputs, _ = self.gru(self.embedding(source))
        return outputs


class AttnDecoder(nn.Module):
    """One step: the last token and the state give the next token and the next state."""

    def __init__(self, vocab, hidden, dropout=0.1):
        super().__init__()
        self.hidden = hidden
        self.attn = nn.Linear(hidden, hidden, bias=False)
        self.embedding = nn.Embedding(vocab, hidden)
        self.cell = nn.GRUCell(2 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(2 * hidden, vocab)

    def forward(self, state, token, encoder_outputs, mask):
        scores = torch.bmm(encoder_outputs, self.attn(state).unsqueeze(2)).squeeze(2).masked_fill(mask, -1e9)
        weights = F.softmax(scores, dim=1)
        context = torch.bmm(weights.unsqueeze(1), encoder_outputs).squeeze(1)
        state = self.cell(torch.cat([self.dropout(self.embedding(token)), context], 1), state)
        return self.out(torch.cat([state, context], 1)), state, weights

    def init_hidden(self, batch):
        return torch.zeros(batch, self.hidden)


def decode(encoder, decoder, source, target=None, teacher_forcing=0.0, length=11):
    encoder_outputs, mask = encoder(source), source == PAD
    state = decoder.init_hidden(len(source))
    token = torch.full((len(source),), SOS, dtype=torch.long)
    logits, attentions = [], []
    for t in range(length):
        step_logits, state, weights = decoder(state, token, encoder_outputs, mask)
        logits.append(step_logits)
        attentions.append(weights)
        use_target = target is not None and random.random() < teacher_forcing
        token = target[:, t] if use_target else step_logits.detach().argmax(1)
    return torch.stack(logits, 1), torch.stack(attentions, 1)


def train_batch(encoder, decoder, source, target, optimizers, criterion, clip):
    for optimizer in optimizers:
        optimizer.zero_grad()
    logits, _ = decode(encoder, decoder, source, target, teacher_forcing=0.8)
    loss = criterion(logits.flatten(0, 1), target.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(encoder.parameters(), clip)
    torch.nn.utils.clip_grad_norm_(decoder.parameters(), clip)
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


@torch.no_grad()
def evaluate(encoder, decoder, source, target):
    encoder.eval(), decoder.eval()
    logits, attention = decode(encoder, decoder, source)
    encoder.train(), decoder.train()
    return (logits.argmax(2) == target).all(1).float().mean().item(), attention


def rng_digest():
    h = hashlib.blake2b(digest_size=8)
    for state in (repr(random.getstate()), repr(np.random.get_state()[1].tolist()), repr(torch.get_rng_state().tolist())):
        h.update(state.encode())
    return h.hexdigest()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=48)
    parser.add_argument("--iters", type=int, default=220)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=5.0)
    parser.add_argument("--print-every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(args.seed)
    atexit.register(lambda: print("rng at exit", rng_digest()))

    pairs = [make_pair(random) for _ in range(4000)]
    sources = torch.tensor([encode(s, 20) for s, _ in pairs])
    targets = torch.tensor([encode(t, 11) for _, t in pairs])
    log.info("%d pairs, longest source %d", len(pairs), max(len(s) for s, _ in pairs))
    encoder, decoder = Encoder(len(VOCAB) + 3, args.hidden), AttnDecoder(len(VOCAB) + 3, args.hidden)
    optimizers = [torch.optim.Adam(encoder.parameters(), lr=args.lr), torch.optim.Adam(decoder.parameters(), lr=args.lr)]
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    history, running = [], 0.0
    for it in range(1, args.iters + 1):
        index = torch.randint(3600, (args.batch_size,))
        running += train_batch(encoder, decoder, sources[index], targets[index], optimizers, criterion, args.clip)
        if it % args.print_every == 0:
            accuracy, _ = evaluate(encoder, decoder, sources[3600:], targets[3600:])
            history.append({"iter": it, "loss": running / args.print_every, "accuracy": accuracy})
            print(f"iter {it:4d} loss {running / args.print_every:.4f} exact match {accuracy:.3f}")
            running = 0.0
    _, attention = evaluate(encoder, decoder, sources[3600:3604], targets[3600:3604])
    np.save("attention.npy", attention.numpy())
    with open("history.json", "w") as f:
        json.dump(history, f, indent=1)
    torch.save({"encoder": encoder.state_dict(), "decoder": decoder.state_dict(), "args": vars(args)}, "seq2seq.pth")
    log.info("saved seq2seq.pth")
    print("rng", rng_digest())


if __name__ == "__main__":
    main()
