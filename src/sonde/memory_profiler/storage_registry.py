"""Registry of live tensor storages: a storage is added when a tensor that uses it is found, and removed when torch frees it.

The registry holds weak references, which torch invalidates when the memory is freed: it keeps nothing alive.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from sonde.leaks.autograd_graphs_alive import live_tensors
from sonde.memory_profiler.bytes_by_owner import DeviceUsage, Owner
from sonde.memory_profiler.memory_report import Peak, Usage
from sonde.nonfinite.module_stack import storage_id
from sonde.statistics.private_torch_api import storage_address

OTHER: Owner = ("other", "")


class _StorageEntry(weakref.ref[Any]):
    """A weak reference to a storage, with its size and owner."""

    __slots__ = ("device", "key", "num_bytes", "owner", "with_batch")

    key: int
    num_bytes: int
    device: str
    owner: Owner
    with_batch: bool  # it grows with the batch


class StorageRegistry:
    """Knows every live storage and its owner, and adds them up by device."""

    def __init__(self, describe_moment: Callable[[], Peak]) -> None:
        self.start = perf_counter()
        self.devices: dict[str, DeviceUsage] = {}
        self._describe_moment = describe_moment
        self._live: dict[int, _StorageEntry] = {}
        self._freed: deque[_StorageEntry] = deque()  # filled by weak references at any moment, processed by `remove_freed`
        self._changed: set[str] = set()  # devices

    def add(self, tensor: Tensor, find_owner: Callable[[Tensor], tuple[Owner, bool]]) -> None:
        """Adds the storage of a tensor. For a new one `find_owner` returns the owner and whether it grows with the batch."""
        try:
            storage = tensor.untyped_storage()
            key, num_bytes = storage_address(storage), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # sparse, or of a kind without a storage
            return
        if tensor.device.type == "meta":  # has no memory
            return
        entry = self._live.get(key)
        if entry is None:
            entry = _StorageEntry(storage, self._freed.append)
            entry.key, entry.num_bytes, entry.device = key, num_bytes, str(tensor.device)
            entry.owner, entry.with_batch = find_owner(tensor)
            self._live[key] = entry
            self._change(entry, num_bytes)
        elif entry.num_bytes != num_bytes:  # resized in place
            change, entry.num_bytes = num_bytes - entry.num_bytes, num_bytes
            self._change(entry, change)

    def assign(self, tensor: Tensor, owner: Owner) -> None:
        """Sets the owner of a parameter, a gradient or an optimizer state. These do not grow with the batch."""
        self.add(tensor, lambda _: (owner, False))
        entry = self._live.get(storage_id(tensor))
        if entry is None or entry.owner == owner:
            return
        device = self.devices[entry.device]
        device.move(entry.owner, owner, entry.num_bytes)
        if entry.with_batch:
            device.batch_bytes -= entry.num_bytes
            entry.with_batch = False
        entry.owner = owner

    def owner_of(self, tensor: Tensor) -> Owner | None:
        entry = self._live.get(storage_id(tensor))
        return entry.owner if entry is not None else None

    def remove_freed(self) -> None:
        """Removes the storages that were freed since the last call."""
        while self._freed:
            entry = self._freed.popleft()
            if self._live.get(entry.key) is entry:
                del self._live[entry.key]
                self._change(entry, -entry.num_bytes)

    def end_operation(self) -> None:
        """Adds a point to the timeline of every device that changed."""
        for device in self._changed:
            self.devices[device].end_operation()
        self._changed.clear()

    def usage(self) -> dict[str, Usage]:
        """The live bytes by device."""
        self.remove_freed()
        return {name: device.usage() for name, device in self.devices.items()}

    def _change(self, entry: _StorageEntry, num_bytes: int) -> None:
        device = self.devices.get(entry.device)
        if device is None:
            device = self.devices[entry.device] = DeviceUsage(self.start, self._describe_moment)
        device.change(entry.owner, num_bytes, with_batch=entry.with_batch)
        self._changed.add(entry.device)


def add_live_tensors(registry: StorageRegistry) -> None:
    """Adds every tensor that Python's garbage collector knows."""
    gc.collect()  # unreachable objects are not in use
    for tensor in live_tensors():
        if type(tensor).__name__ == "FakeTensor":
            continue  # left by torch.compile or torch.export: it has no memory, and reading its symbolic size may end the process
        try:
            registry.add(tensor, _guess_owner)
            gradient = tensor.grad if tensor.is_leaf else None
            if gradient is not None:
                registry.assign(gradient, ("gradients", ""))
        except Exception:  # a tensor subclass that raises when it is inspected
            continue


def _guess_owner(tensor: Tensor) -> tuple[Owner, bool]:
    if isinstance(tensor, nn.Parameter):
        return ("parameters", ""), False
    return (("activations", "") if tensor.grad_fn is not None else OTHER), False


def state_tensors(state: Any) -> Iterable[Tensor]:
    """The tensors of an optimizer's state for one parameter, including those in nested lists and dicts (LBFGS)."""
    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple, dict)):
            yield from state_tensors(value)
