"""The workers of a DataLoader draw the same random numbers.

What it finds    a dataset, a transform in it or a collate_fn that draws from a random generator of its own or of its module
                 (rng = np.random.default_rng(0)), or a worker_init_fn that seeds a global one with the same number in every worker.
Why it matters   every worker gets a copy in the same state: with four workers each augmentation comes four times, and, unless
                 the workers persist, the same ones again in every epoch. Nothing fails, and there is less variety than meant.
How it knows     a DataLoader with several workers was started, and the code that runs when a sample is asked for draws from such a
                 generator. The code is read, not run. (The global generators of torch, random and numpy are seeded
                 differently in each worker, by torch itself.)
Known problems   a generator that is only used to make the data, before the workers start (K94), is not drawn from in them. Code that
                 asks for its worker (get_worker_info, torch.initial_seed) or a worker_init_fn that takes hold of the dataset or of
                 that generator is taken to do it right. Draws deep inside of other libraries are not seen.
Fix              make the generator in the worker: seed it from torch.initial_seed(), or use the global generator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.batches import Loader
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.words import listing

FAULTS = ("copied_generators", "copied_globals", "seeded_alike")
GLOBAL = {"numpy": "np.random", "torch": "torch's generator", "random": "the random module"}


@dataclass(slots=True)
class WorkerRngDuplicate:
    name: ClassVar[str] = "worker-rng-duplicate"
    explains: ClassVar[tuple[str, ...]] = ()

    num_loaders: int = 0
    suspect: Loader = field(default_factory=Loader)
    step: int = -1

    def see(self, step: Step) -> None:
        for event in step.events:
            if event.kind == "source" and event.data.get("call") == "loader" and "copied_generators" in event.data:
                self.num_loaders += 1
                if self.step < 0 and any(_names(event.data, key) for key in FAULTS):
                    self.suspect, self.step = Loader(event.data), step.number

    def answer(self) -> Answer:
        if not self.num_loaders:
            return NotEvaluated("no DataLoader with several workers was started")
        if self.step < 0:
            return Clear()
        loader = self.suspect
        held, outside, alike = (_names(loader.facts, key) for key in FAULTS)
        copied = held + outside
        if held:
            why = f"each gets a copy of {listing(held)} of the {loader.facts.get('dataset', 'dataset')}"
        elif outside:
            why = f"each gets a copy of the generator {listing(outside)}"
        else:
            why = f"worker_init_fn seeds {listing([GLOBAL.get(name, name) for name in alike])} with the same number in each"
        return [
            Finding(
                rule=self.name,
                severity=Severity.WARNING,
                where="",
                step=self.step,
                cause=f"the {loader.num_workers} workers of the DataLoader{loader.at} draw the same random numbers: {why}"
                + ("" if loader.facts.get("persistent_workers") else ", and again in every epoch"),
                fix="make the generator inside of the worker, seeded from torch.initial_seed() (it differs in each worker and epoch)"
                if copied
                else "leave the seeding to torch, which does it for each worker, or seed from torch.initial_seed() % 2**32",
                evidence={"num_workers": loader.num_workers, "generators": listing(copied or alike), **loader.evidence()},
            )
        ]


def _names(facts: Mapping[str, Any], key: str) -> list[str]:
    names = facts.get(key)
    return [str(name) for name in names] if isinstance(names, list) else []
