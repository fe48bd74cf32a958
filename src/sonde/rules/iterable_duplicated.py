"""Every worker of a DataLoader delivers the whole stream.

What it finds    an IterableDataset that does not divide its samples among the workers: each sample comes once per worker.
Why it matters   an epoch is as many times longer as there are workers, and batches in a row are copies of each other: the
                 training takes several steps on the same samples, and averages over the epoch count them again.
How it knows     the dataset is iterable, there are several workers, neither the code of the dataset nor a worker_init_fn asks in
                 which worker it is, and batches of two steps in a row were the same.
Known problems   a stream that draws at random gives different batches in each worker, and is left alone. A dataset that is
                 told its part in another way never gives the same batch twice in a row.
Fix              in __iter__, ask torch.utils.data.get_worker_info() and yield every num_workers-th sample, beginning with id.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.batches import Loader, Repeats
from sonde.rules.rule import Answer, Clear, NotEvaluated

LEAST = 0.25  # of the steps in a row: two workers in turn give one pair in two, and some pairs are lost where epochs meet
PAIRS = 2  # steps in a row


@dataclass(slots=True)
class IterableDuplicated:
    name: ClassVar[str] = "iterable-duplicated"
    explains: ClassVar[tuple[str, ...]] = ("same-batch",)

    loader: Loader = field(default_factory=Loader)
    repeats: Repeats = field(default_factory=Repeats)

    def see(self, step: Step) -> None:
        self.loader.see(step)
        self.repeats.see(step)

    def answer(self) -> Answer:
        loader, seen = self.loader, self.repeats
        if loader.order != "stream" or loader.num_workers < 2:
            return NotEvaluated("no IterableDataset was loaded by several workers")
        if loader.facts.get("knows_worker"):
            return Clear()
        if seen.num_adjacent < PAIRS:
            return NotEvaluated(f"only {seen.num_adjacent} batches were looked at right after another one")
        if seen.num_alike < LEAST * seen.num_adjacent or seen.num_alike == 0:
            return Clear()
        return [
            Finding(
                rule=self.name,
                severity=Severity.WARNING,
                where="",
                step=seen.first_step,
                cause=f"the {loader.num_workers} workers of the DataLoader{loader.at} each deliver the whole "
                f"{loader.facts.get('dataset', 'dataset')}: {seen.num_alike} of {seen.num_adjacent} batches were a copy of the one before",
                fix="divide the samples in __iter__: islice(samples, info.id, None, info.num_workers) with info = get_worker_info()",
                evidence={
                    "num_workers": loader.num_workers, "num_alike": seen.num_alike, "num_adjacent": seen.num_adjacent, **loader.evidence(),
                },
            )
        ]  # fmt: skip
