"""Counts the bytes that autograd saves in the forward for the backward: the activations of a step."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sonde.statistics.find_tensors import find_tensors


class SavedActivations:
    """Counter of saved bytes, active inside `context`; a storage that several nodes save counts once, for the first of them."""

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        """`excluded`: parameters and buffers, which exist anyway."""
        self.total = 0
        self._counted = {_storage_pointer(tensor) for tensor in excluded} | {0}

    def read(self) -> int:
        return self.total

    @contextmanager
    def context(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Counts inside; the inputs of the model (`args`, `kwargs`) are excluded."""
        self._counted.update(_storage_pointer(tensor) for _, tensor in find_tensors((args, kwargs)))
        with torch.autograd.graph.saved_tensors_hooks(self._on_save, lambda tensor: tensor):
            yield

    def _on_save(self, tensor: Tensor) -> Tensor:
        pointer = _storage_pointer(tensor)
        if pointer not in self._counted:
            self._counted.add(pointer)
            self.total += tensor.untyped_storage().nbytes()
        return tensor


def _storage_pointer(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, lazy and other tensors without a contiguous storage
        return 0
