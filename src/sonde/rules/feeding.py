"""What is worth telling of the data of a training: who hands them out, in which order, and how often each label comes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from sonde.events import Step
from sonde.rules.batches import Balance, Loader, labels_of
from sonde.rules.words import number

ENOUGH = 3  # batches with labels: fewer say nothing of how often each comes
MOST_CLASSES = 1000  # beyond are vocabularies: words are not balanced
_ORDERS = {"random": "shuffled", "sequential": "in the order of the dataset", "stream": "as a stream", "other": "in an order of its own"}


@dataclass(slots=True)
class Feeding:
    """A fold over the steps of one process."""

    loader: Loader = field(default_factory=Loader)
    balance: Balance = field(default_factory=Balance)

    def see(self, step: Step) -> None:
        self.loader.see(step)
        labels = labels_of(step)
        if labels is not None:
            self.balance.add(labels)

    def sentences(self) -> Iterator[tuple[str, str]]:
        """A word and a sentence each."""
        if order := _ORDERS.get(self.loader.order):
            loader = self.loader
            num, workers = loader.num_batches, loader.num_workers
            batches = f"{num} batch{'es' * (num != 1)}" if num else "batches"
            size = f" of {loader.batch_size}" if loader.batch_size else ""
            by = f"{workers or 'no'} worker{'s' * (workers != 1)}"
            yield "data", f"{batches}{size} from the DataLoader{loader.at}, {order}, {by}"
        balance = self.balance
        if balance.num_batches >= ENOUGH and len(balance.totals) > 1 and balance.num_classes <= MOST_CLASSES:
            (most, often), *_, (least, rarely) = sorted(balance.totals.items(), key=lambda pair: (-pair[1], pair[0]))
            total = balance.totals.total()
            yield "labels", (
                f"{len(balance.totals)} of {balance.num_classes} classes in {total:,} labels that were looked at, "
                f"from {_share(often, total)} (class {most}) to {_share(rarely, total)} (class {least})"
            )


def _share(times: int, total: int) -> str:
    return f"{number(float(f'{100 * times / total:.2g}'))} %"
