"""Counting what autograd keeps of the forward for the backward: the activations that a step's memory is made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sonde.statistics.tensor_utils import find_tensors


class KeptBytes:
    """`read` only goes up; it counts inside `around`. A memory that several nodes keep counts once, for the first of them."""

    def __init__(self, left_out: Iterable[Tensor]) -> None:
        """`left_out`: parameters and buffers, which are there anyway."""
        self.total = 0
        self._seen = {place for tensor in left_out if (place := _place(tensor)) is not None}

    def read(self) -> int:
        return self.total

    @contextmanager
    def around(self, args: Any, kwargs: Any) -> Iterator[None]:
        self._seen.update(place for _, tensor in find_tensors((args, kwargs)) if (place := _place(tensor)) is not None)
        with torch.autograd.graph.saved_tensors_hooks(self._keep, _give):
            yield

    def _keep(self, tensor: Tensor) -> Tensor:
        place = _place(tensor)
        if place is not None and place not in self._seen:
            self._seen.add(place)
            self.total += tensor.untyped_storage().nbytes()
        return tensor


def _give(tensor: Tensor) -> Tensor:
    return tensor


def _place(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):  # sparse, lazy, and other tensors without a memory of one piece
        return None
