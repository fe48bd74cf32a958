"""Registry of live tensor storages, and their bytes by device, category and module, with the peak and a timeline.

A storage is added when a tensor that uses it is found, and removed when torch frees it. The registry holds weak references, which torch
invalidates when the memory is freed: it keeps nothing alive.
"""

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from sonde.leaks.autograd_graphs_alive import live_tensors
from sonde.memory_profiler.memory_report import CATEGORIES, Peak, TimelinePoint, Usage
from sonde.nonfinite.module_stack import storage_id
from sonde.statistics.private_torch_api import storage_address

MAX_POINTS = 1024  # of the timeline: more than a plot has columns
_INDEX = {category: index for index, category in enumerate(CATEGORIES)}

Owner = tuple[str, str]  # category, path of the module


class DeviceUsage:
    """Counts live bytes by owner, and copies the counts at every new maximum."""

    def __init__(self, start: float, describe_moment: Callable[[], Peak]) -> None:
        """`describe_moment` returns the current phase, module and operation, as a peak without numbers."""
        self._start, self._describe_moment = start, describe_moment
        self.total = 0
        self.batch_bytes = 0  # part of the total that grows with the batch
        self.batch_most, self.batch_rest = 0, 0  # highest value of `batch_bytes`, and the other live bytes at that moment
        self._owners: dict[Owner, int] = {}
        self._categories = [0] * len(CATEGORIES)
        self._highest = 0
        self._is_peak_pending = False  # the total is at a new maximum that was not copied yet
        self._peak = Peak(Usage())
        self._peak_owners: dict[Owner, int] = {}
        self._peak_batch_bytes = 0
        self.points: list[TimelinePoint] = []  # the timeline
        self._changes_per_point, self._num_changes = 1, 0  # the latter since the last point

    def change(self, owner: Owner, num_bytes: int, *, with_batch: bool = False) -> None:
        """Adds (or with a negative number removes) bytes; `with_batch` if they grow with the batch."""
        if num_bytes < 0 and self._is_peak_pending:
            self._copy_peak()
        self.total += num_bytes
        if with_batch:
            self.batch_bytes += num_bytes
            if self.batch_bytes >= self.batch_most:
                self.batch_most, self.batch_rest = self.batch_bytes, self.total - self.batch_bytes
        self._add(owner, num_bytes)
        if self.total >= self._highest and num_bytes > 0:  # also if equal: in later steps more owners are known
            self._highest, self._is_peak_pending = self.total, True
            self._peak = self._describe_moment()

    def move(self, before: Owner, after: Owner, num_bytes: int) -> None:
        """Assigns the same bytes to another owner."""
        self._add(before, -num_bytes)
        self._add(after, num_bytes)

    def _add(self, owner: Owner, num_bytes: int) -> None:
        self._owners[owner] = self._owners.get(owner, 0) + num_bytes
        self._categories[_INDEX[owner[0]]] += num_bytes

    def end_operation(self) -> None:
        """Adds a point to the timeline. Once it is full, neighboring points are merged and the higher one stays."""
        point = TimelinePoint(perf_counter() - self._start, tuple(self._categories))
        self._num_changes += 1
        if self.points and self._num_changes < self._changes_per_point:
            if point.total > self.points[-1].total:
                self.points[-1] = point
            return
        self._num_changes = 0
        self.points.append(point)
        if len(self.points) >= MAX_POINTS:
            self.points = [max(pair, key=lambda one: one.total) for pair in zip(self.points[::2], self.points[1::2])]
            self._changes_per_point *= 2

    def usage(self) -> Usage:
        return _usage(self._owners)

    def peak(self) -> Peak:
        if self._is_peak_pending:
            self._copy_peak()
        return replace(self._peak, usage=_usage(self._peak_owners), batch_bytes=self._peak_batch_bytes)

    def _copy_peak(self) -> None:
        self._is_peak_pending = False
        self._peak_owners = dict(self._owners)
        self._peak_batch_bytes = self.batch_bytes


def _usage(owners: dict[Owner, int]) -> Usage:
    by_category: dict[str, dict[str, int]] = {}
    for (category, path), num_bytes in owners.items():
        if num_bytes:
            by_category.setdefault(category, {})[path] = num_bytes
    return Usage(by_category)


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

    def owner_of(self, tensor: Tensor) -> Owner:
        entry = self._live.get(storage_id(tensor))
        return entry.owner if entry is not None else OTHER

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
        if entry.device not in self.devices:
            self.devices[entry.device] = DeviceUsage(self.start, self._describe_moment)
        self.devices[entry.device].change(entry.owner, num_bytes, with_batch=entry.with_batch)
        self._changed.add(entry.device)


def add_live_tensors(registry: StorageRegistry) -> None:
    """Adds every tensor that Python's garbage collector knows."""
    gc.collect()  # unreachable objects are not in use
    for tensor in live_tensors():
        if type(tensor).__name__ == "FakeTensor":
            continue  # left by torch.compile or torch.export: it has no memory, and reading its symbolic size may end the process
        try:
            registry.add(tensor, _guess_owner)
            if tensor.is_leaf and tensor.grad is not None:
                registry.assign(tensor.grad, ("gradients", ""))
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
