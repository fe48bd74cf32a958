"""Finds the dataset indices of samples in a batch: from a sequential sampler, or by comparing the content with a TensorDataset."""

import gc
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, SequentialSampler, Subset, TensorDataset

from sonde.capture import torch_patches
from sonde.statistics.private_torch_api import DataLoaderIterator, iterator_dataset, iterator_position

MAX_NUMBERS = 50_000_000  # elements of a dataset tensor; larger ones are not compared


def dataset_indices(samples: Sequence[int], inputs: Sequence[Tensor], batch_size: int, *, batches_ago: int = 0) -> tuple[int, ...] | None:
    """The dataset indices of samples in a batch; None if they are unknown or ambiguous.

    Args:
        samples: indices in the batch.
        inputs: the tensors of the batch.
        batches_ago: how many batches the loader has returned after this one.
    """
    if not samples:
        return None
    # gc.get_objects takes a tenth of a second in a large program, so it is the fallback for loaders that started before the patches.
    for list_objects in (torch_patches.iterators.copy, gc.get_objects):
        loaders = [item for item in list_objects() if DataLoaderIterator is not None and issubclass(type(item), DataLoaderIterator)]
        guesses = [_by_content(loader, samples, inputs, batch_size) or _by_order(loader, samples, batches_ago) for loader in loaders]
        if found := set(filter(None, guesses)):
            return found.pop() if len(found) == 1 else None
    return None


def _by_order(loader: Any, samples: Sequence[int], batches_ago: int) -> tuple[int, ...] | None:
    """From the number of batches that a loader with a sequential sampler has returned."""
    sampler, num_batches = iterator_position(loader)
    if not isinstance(sampler, BatchSampler) or not isinstance(sampler.sampler, SequentialSampler) or num_batches <= batches_ago:
        return None
    first, dataset = (num_batches - 1 - batches_ago) * sampler.batch_size, iterator_dataset(loader)
    positions = [first + sample for sample in samples]
    return tuple(int(dataset.indices[position]) for position in positions) if isinstance(dataset, Subset) else tuple(positions)


def _by_content(loader: Any, samples: Sequence[int], inputs: Sequence[Tensor], batch_size: int) -> tuple[int, ...] | None:
    """By comparing each sample with all rows of a TensorDataset; None if a sample matches no row or several."""
    dataset = iterator_dataset(loader)
    whole = dataset.dataset if isinstance(dataset, Subset) else dataset
    if not isinstance(whole, TensorDataset):
        return None
    batch = [x for x in inputs if x.dim() and x.shape[0] == batch_size]
    found: list[int] = []
    for sample in samples:
        same: Tensor | None = None
        for column in whole.tensors:
            rows = [x[sample] for x in batch if x.shape[1:] == column.shape[1:] and x.dtype == column.dtype and x.device == column.device]
            if rows and column.numel() <= MAX_NUMBERS:
                equal = _equal(column, rows[0])
                same = equal if same is None else same & equal
        if same is None or int(same.sum()) != 1:
            return None
        found.append(int(same.nonzero()))
    return tuple(found)


def _equal(column: Tensor, row: Tensor) -> Tensor:
    equal = (column == row) | ((column != column) & (row != row))  # NaN equals NaN here
    return equal.reshape(len(column), -1).all(dim=1) if column.dim() > 1 else equal
