"""The book of storages: each piece of memory that tensors share is entered once when it is first seen, and struck out when it is freed.

A storage is known by a weak reference, which torch keeps as long as the memory itself: nothing is kept alive by being counted.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from sonde.leaks.live_graphs import live_tensors
from sonde.memory_profiler.device_usage import Account, Place
from sonde.memory_profiler.memory_report import Peak, Usage
from sonde.nonfinite.module_stack import storage_id

OUTSIDE: Place = ("other", "")


class _Entry(weakref.ref[Any]):
    __slots__ = ("device", "key", "num_bytes", "place", "with_batch")

    key: int
    num_bytes: int
    device: str
    place: Place
    with_batch: bool


class Book:
    def __init__(self, where: Callable[[], Peak]) -> None:
        self.began = perf_counter()
        self.accounts: dict[str, Account] = {}
        self._where = where
        self._live: dict[int, _Entry] = {}
        self._freed: deque[_Entry] = deque()  # told by weak references, at any moment: only noted then
        self._changed: set[str] = set()  # devices

    def enter(self, tensor: Tensor, place: Callable[[Tensor], tuple[Place, bool]]) -> None:
        """A tensor was seen. What it is, and whether it grows with the batch, is only asked where its memory is new."""
        try:
            storage = tensor.untyped_storage()
            key, num_bytes = storage._cdata, storage.nbytes()
        except (RuntimeError, NotImplementedError):  # sparse, or of a kind without memory of its own
            return
        if tensor.device.type == "meta":  # a shape without memory
            return
        entry = self._live.get(key)
        if entry is None:
            entry = _Entry(storage, self._freed.append)
            entry.key, entry.num_bytes, entry.device = key, num_bytes, str(tensor.device)
            entry.place, entry.with_batch = place(tensor)
            self._live[key] = entry
            self._change(entry, num_bytes)
        elif entry.num_bytes != num_bytes:  # resized in place
            change, entry.num_bytes = num_bytes - entry.num_bytes, num_bytes
            self._change(entry, change)

    def assign(self, tensor: Tensor, place: Place) -> None:
        """It is known now what this tensor is: a parameter, its gradient, a state of its optimizer. These do not grow with the batch."""
        self.enter(tensor, lambda _: (place, False))
        entry = self._live.get(storage_id(tensor))
        if entry is None or entry.place == place:
            return
        account = self.accounts[entry.device]
        account.move(entry.place, place, entry.num_bytes)
        if entry.with_batch:
            account.batch_bytes -= entry.num_bytes
            entry.with_batch = False
        entry.place = place

    def place_of(self, tensor: Tensor) -> Place | None:
        entry = self._live.get(storage_id(tensor))
        return entry.place if entry is not None else None

    def strike_out(self) -> None:
        """Takes out what was freed since."""
        while self._freed:
            entry = self._freed.popleft()
            if self._live.get(entry.key) is entry:
                del self._live[entry.key]
                self._change(entry, -entry.num_bytes)

    def settled(self) -> None:
        """An operation is over."""
        for device in self._changed:
            self.accounts[device].settled()
        self._changed.clear()

    def usage(self) -> dict[str, Usage]:
        self.strike_out()
        return {device: account.usage() for device, account in self.accounts.items()}

    def _change(self, entry: _Entry, num_bytes: int) -> None:
        account = self.accounts.get(entry.device)
        if account is None:
            account = self.accounts[entry.device] = Account(self.began, self._where)
        account.change(entry.place, num_bytes, with_batch=entry.with_batch)
        self._changed.add(entry.device)


def census(book: Book) -> None:
    """Enters every tensor that Python knows and that is not in the book yet."""
    gc.collect()  # what only waits for the collector is not in use
    for tensor in live_tensors():
        try:
            book.enter(tensor, _at_first_sight)
            gradient = tensor.grad if tensor.is_leaf else None
            if gradient is not None:
                book.assign(gradient, ("gradients", ""))
        except Exception:  # a stranger's tensor, which refuses to be asked
            continue


def _at_first_sight(tensor: Tensor) -> tuple[Place, bool]:
    if isinstance(tensor, nn.Parameter):
        return ("parameters", ""), False
    return (("activations", "") if tensor.grad_fn is not None else OUTSIDE), False


def tensors_of(state: Any) -> Iterable[Tensor]:
    """The tensors of an optimizer's state for one parameter, also those in lists (as LBFGS keeps them)."""
    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple, dict)):
            yield from tensors_of(value)

