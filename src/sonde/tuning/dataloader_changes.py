"""Patches DataLoader inside a trial: applies the changes of the trial and counts batches, samples and waiting time per loader."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from sonde.capture.monkeypatch import override
from sonde.statistics.find_tensors import find_tensors
from sonde.statistics.private_torch_api import DataLoaderIterator, num_prefetched_batches
from sonde.tuning.stable_call_site_ids import call_site_here
from sonde.tuning.trial_messages import CallSite, DataLoaderInfo

Key = tuple[str, str, int]  # key of the call site, class of the dataset, length of the dataset


@dataclass(slots=True)
class LoaderUsage:
    """Counters of the loaders that one line creates for one dataset; a line may create a training and a validation loader."""

    site: CallSite
    num_workers: int
    batch_size: int | None
    pin_memory: bool
    is_iterable: bool
    is_persistent: bool
    num_epochs: int = 0
    has_fed_step: bool = False  # the current step has fetched from it
    num_fed_steps: int = 0
    iterator: weakref.ref[Any] | None = None  # the latest
    num_prefetched: int = 0  # batches ready at `start_measuring`
    num_batches: int = 0  # fetched since `start_measuring`
    num_samples: int = 0
    waited_s: float = 0.0


class DataLoaderPatcher:
    """Patches the constructor and the iteration of DataLoader for the rest of the process."""

    def __init__(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        self._changes = changes
        self._usages: dict[Key, LoaderUsage] = {}
        self._num_steps = 0
        self._sources: weakref.WeakKeyDictionary[Any, Key] = weakref.WeakKeyDictionary()  # of a loader or its iterator

    def install(self) -> None:
        """Never undone: the process ends with the trial."""
        override(DataLoader, "__init__", self._wrap_init)
        override(DataLoader, "__iter__", self._wrap_iter)
        override(DataLoaderIterator, "__next__", self._wrap_next)

    def _wrap_init(self, original: Any) -> Any:
        signature = inspect.signature(original)

        def __init__(loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
            site = call_site_here()
            change = self._changes.get(site.key)
            if change:
                bound = signature.bind(loader, *args, **kwargs)
                bound.arguments.update(change)
                args, kwargs = bound.args[1:], bound.kwargs
            original(loader, *args, **kwargs)
            self._add(loader, site)

        return __init__

    def _wrap_iter(self, original: Any) -> Any:
        def __iter__(loader: DataLoader[Any]) -> Any:
            iterator = original(loader)
            key = self._sources.get(loader)
            if key is not None:
                self._sources[iterator] = key
                self._usages[key].num_epochs += 1
                self._usages[key].iterator = weakref.ref(iterator)
            return iterator

        return __iter__

    def _wrap_next(self, original: Any) -> Any:
        def __next__(iterator: Any) -> Any:
            began = perf_counter()
            batch = original(iterator)
            key = self._sources.get(iterator)
            if key is not None:
                usage = self._usages[key]
                usage.waited_s += perf_counter() - began
                usage.num_batches += 1
                usage.num_samples += num_samples(batch)
                usage.has_fed_step = True
            return batch

        return __next__

    def start_measuring(self) -> None:
        """Reset the counters at the end of the warm-up."""
        for usage in self._usages.values():
            usage.num_batches, usage.num_samples, usage.waited_s = 0, 0, 0.0
            usage.num_prefetched = num_prefetched(usage.iterator)

    def on_step_end(self) -> None:
        self._num_steps += 1
        for usage in self._usages.values():
            usage.num_fed_steps += usage.has_fed_step
            usage.has_fed_step = False

    def totals(self) -> tuple[int, float, float]:
        """Samples, waiting seconds and prefetched share since `start_measuring`, of the loaders that feed the training.

        Workers prefetch batches while a script starts. Using these up is faster than the loader is in the long run, so `Trial` subtracts
        their share from the speed.
        """
        feeding = [usage for usage in self._usages.values() if 2 * usage.num_fed_steps >= self._num_steps]
        used = [(max(usage.num_prefetched - num_prefetched(usage.iterator), 0), usage.num_batches) for usage in feeding]
        shares = [num / num_batches for num, num_batches in used if num_batches]
        return sum(usage.num_samples for usage in feeding), sum(usage.waited_s for usage in feeding), min(max(shares, default=0.0), 1.0)

    def describe(self) -> tuple[DataLoaderInfo, ...]:
        num_steps = max(self._num_steps, 1)
        return tuple(
            DataLoaderInfo(
                usage.site, usage.num_workers, usage.batch_size, usage.pin_memory, usage.is_iterable, usage.is_persistent,
                usage.num_epochs, usage.num_fed_steps / num_steps,
            )
            for usage in self._usages.values()
        )  # fmt: skip

    def _add(self, loader: DataLoader[Any], site: CallSite) -> None:
        key = self._sources[loader] = (site.key, *_dataset_key(loader.dataset))
        if key not in self._usages:
            self._usages[key] = LoaderUsage(
                site, loader.num_workers, loader.batch_size, loader.pin_memory,
                isinstance(loader.dataset, IterableDataset), loader.persistent_workers,
            )  # fmt: skip


def _dataset_key(dataset: Any) -> tuple[str, int]:
    """Equal for the datasets of two epochs, even if the script creates them anew; almost never equal for training and validation."""
    try:
        num = len(dataset)
    except Exception:  # raised by the user's dataset
        num = -1
    return type(dataset).__qualname__, num


def num_prefetched(reference: weakref.ref[Any] | None) -> int:
    """Batches that workers have made and the training has not fetched."""
    iterator = reference() if reference is not None else None
    return num_prefetched_batches(iterator) if iterator is not None else 0


def num_samples(batch: Any) -> int:
    """The first dimension of the first tensor that has one; 1 for a batch without such a tensor."""
    return next((tensor.shape[0] for _, tensor in find_tensors(batch) if tensor.dim()), 1)
