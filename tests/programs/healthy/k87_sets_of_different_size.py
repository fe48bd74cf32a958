"""The mean of a set of points, whose number differs from set to set: nested tensors, a lazy head, and a model without a truth value."""
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore", message=".*nested tensors is in prototype stage.*")


class Encoder(nn.Module):
    """Has a length, as a container would, and is no list."""

    def __init__(self):
        super().__init__()
        self.lift, self.mix = nn.Linear(3, 24), nn.Linear(24, 24)

    def forward(self, sets):
        return self.mix(torch.relu(self.lift(sets)))

    def __len__(self):
        return 0

    def __eq__(self, other):
        raise TypeError("encoders are not comparable")

    __hash__ = nn.Module.__hash__


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sets = [torch.randn(int(size), 3) + torch.randn(3) for size in torch.randint(2, 7, (480,))]
    encoder, head = Encoder(), nn.LazyLinear(3)
    head(torch.zeros(1, 24))
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=3e-3)
    loader = DataLoader(sets, batch_size=16, shuffle=True, collate_fn=list)
    for epoch in range(4):
        for group in loader:
            encoded = encoder(torch.nested.nested_tensor(group)).to_padded_tensor(0.0).sum(1)
            sizes = torch.tensor([len(each) for each in group])[:, None]
            loss = nn.functional.mse_loss(head(encoded / sizes), torch.stack([each.mean(0) for each in group]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"final loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
