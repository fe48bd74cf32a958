"""The DataLoaders of the script, inside a trial: changed where the trial says so, watched while they feed the training."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from sonde.statistics.tensor_utils import find_tensors
from sonde.statistics.torch_internals import DataLoaderIterator, num_prefetched_batches
from sonde.tuning.call_site_keys import place_here
from sonde.tuning.messages import Loader, Place

Key = tuple[str, str, int]  # the line that makes it, the class of its dataset and how much that holds


@dataclass(slots=True)
class Seen:
    """All loaders that one line makes for one kind of dataset: a line may make that of the training and that of the validation."""

    place: Place
    num_workers: int
    batch_size: int | None
    pin_memory: bool
    is_iterable: bool
    is_persistent: bool
    num_epochs: int = 0
    fed: bool = False  # the step under way
    num_fed: int = 0  # steps
    iterator: weakref.ref[Any] | None = None  # the newest
    num_ready: int = 0  # batches that lay ready at the mark
    num_batches: int = 0  # fetched since
    num_samples: int = 0
    waited_s: float = 0.0


class Loaders:
    def __init__(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        self._changes = changes
        self._seen: dict[Key, Seen] = {}
        self._num_steps = 0
        self._sources: weakref.WeakKeyDictionary[Any, Key] = weakref.WeakKeyDictionary()  # of a loader or its iterator

    def install(self) -> None:
        """For good: the process belongs to the trial."""
        iterator_class: Any = DataLoaderIterator
        make, iterate, fetch = DataLoader.__init__, DataLoader.__iter__, iterator_class.__next__
        signature = inspect.signature(make)

        @functools.wraps(make)
        def __init__(loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
            place = place_here()
            change = self._changes.get(place.key)
            if change:
                bound = signature.bind(loader, *args, **kwargs)
                bound.arguments.update(change)
                args, kwargs = bound.args[1:], bound.kwargs
            make(loader, *args, **kwargs)
            self._note(loader, place)

        @functools.wraps(iterate)
        def __iter__(loader: DataLoader[Any]) -> Any:
            iterator = iterate(loader)
            key = self._sources.get(loader)
            if key is not None:
                self._sources[iterator] = key
                self._seen[key].num_epochs += 1
                self._seen[key].iterator = weakref.ref(iterator)
            return iterator

        @functools.wraps(fetch)
        def __next__(iterator: Any) -> Any:
            began = perf_counter()
            batch = fetch(iterator)
            key = self._sources.get(iterator)
            if key is not None:
                seen = self._seen[key]
                seen.waited_s += perf_counter() - began
                seen.num_batches += 1
                seen.num_samples += num_samples(batch)
                seen.fed = True
            return batch

        for owner, patched in ((DataLoader, __init__), (DataLoader, __iter__), (iterator_class, __next__)):
            setattr(owner, patched.__name__, patched)

    def mark(self) -> None:
        """From here on it counts."""
        for seen in self._seen.values():
            seen.num_batches, seen.num_samples, seen.waited_s = 0, 0, 0.0
            seen.num_ready = num_ready(seen.iterator)

    def step_ended(self) -> None:
        self._num_steps += 1
        for seen in self._seen.values():
            seen.num_fed += seen.fed
            seen.fed = False

    def totals(self) -> tuple[int, float, float]:
        """Samples and seconds of waiting since the mark, of the loaders that feed the training, and the share of batches from stock.

        Workers lay in a stock while a script starts. Living on it is quick, and over when it is used up: it must not count as their pace.
        """
        feeding = [seen for seen in self._seen.values() if 2 * seen.num_fed >= self._num_steps]
        shares = [max(seen.num_ready - num_ready(seen.iterator), 0) / seen.num_batches for seen in feeding if seen.num_batches]
        return sum(seen.num_samples for seen in feeding), sum(seen.waited_s for seen in feeding), min(max(shares, default=0.0), 1.0)

    def facts(self) -> tuple[Loader, ...]:
        num_steps = max(self._num_steps, 1)
        return tuple(
            Loader(
                seen.place, seen.num_workers, seen.batch_size, seen.pin_memory, seen.is_iterable, seen.is_persistent,
                seen.num_epochs, seen.num_fed / num_steps,
            )
            for seen in self._seen.values()
        )  # fmt: skip

    def _note(self, loader: DataLoader[Any], place: Place) -> None:
        key = self._sources[loader] = (place.key, *_kind_of(loader.dataset))
        if key not in self._seen:
            self._seen[key] = Seen(
                place, loader.num_workers, loader.batch_size, loader.pin_memory,
                isinstance(loader.dataset, IterableDataset), loader.persistent_workers,
            )  # fmt: skip


def _kind_of(dataset: Any) -> tuple[str, int]:
    """Those of two epochs are alike, also where the script makes them anew; those of training and validation hardly ever are."""
    try:
        num = len(dataset)
    except Exception:  # whatever the user's own says
        num = -1
    return type(dataset).__qualname__, num


def num_ready(reference: weakref.ref[Any] | None) -> int:
    """Batches that workers have made and nobody has fetched."""
    iterator = reference() if reference is not None else None
    return num_prefetched_batches(iterator) if iterator is not None else 0


def num_samples(batch: Any) -> int:
    """The first dimension of the first tensor that has one; a batch of something else counts as one sample."""
    return next((tensor.shape[0] for _, tensor in find_tensors(batch) if tensor.dim()), 1)
