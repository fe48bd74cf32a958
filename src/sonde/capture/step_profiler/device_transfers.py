"""Records transfers of tensors between devices: lines, bytes, and whether they are avoidable.

Two consecutive steps are recorded: the profiled one and, if it moved tensors, the next, whose transfers are reported with those that the
first step made too: a batch is a new tensor in each step, a constant is the same tensor with the same content.
Tested on the meta device and on a device written in Python, not with a real accelerator.
"""

from __future__ import annotations

from collections import Counter
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sonde.capture.step_phase_timer import PhaseTimer
from sonde.capture.tensor_method_patch import MethodCall, TensorMethodPatch
from sonde.capture.tensors_on_wrong_device import find_holders
from sonde.capture.user_source_line import describe_line, direct_user_frame
from sonde.capture.watched_models_registry import ModelRegistry
from sonde.statistics.content_hash import content_hash
from sonde.statistics.private_torch_api import gradient_device, graph_task_id, storage_address, tensor_version

NAMES = ("to", "cuda", "xpu", "cpu", "copy_")
PINS = ("cuda",)  # devices that copy from pinned memory asynchronously; other copies block Python
MAX_LINES = 64
MAX_TENSORS = 64  # distinct tensors per line
MAX_NODES = 256  # of a graph, searched for the origin of a tensor
MAX_BETWEEN = 4  # library frames between a line and the call, as in batch.to(device); with more, the library moves its own tensors

_Key = tuple[int, Any, torch.Size, tuple[int, ...], torch.dtype]


class _MovedTensor:
    """Identity and content of a CPU tensor that was moved to a device, without a reference to it."""

    __slots__ = ("fingerprint", "storage", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.storage = _weak_storage(tensor)  # while it exists, the same address is the same storage
        self.version = -1 if tensor.is_inference() else tensor_version(tensor)
        self.fingerprint = content_hash(tensor)  # numpy may write to it without changing the version

    def is_unchanged_in(self, other: _MovedTensor) -> bool:
        is_same = self.version == other.version and self.fingerprint == other.fingerprint
        return is_same and self.fingerprint is not None and not self.storage.expired()


class _LineTransfers:
    """Counters of a line that moves tensors between two devices, in one step."""

    def __init__(self, line: tuple[str, str], call: str, origin: torch.device, target: torch.device) -> None:
        self.line, self.call, self.origin, self.target = line, call, origin, target
        self.num = self.num_bytes = self.ns = self.num_back = self.num_pageable = 0
        self.moved: dict[_Key, _MovedTensor] = {}
        self.same: set[_Key] = set()
        self.again: Counter[_Key] = Counter()
        self.largest = [(-1, ""), (-1, "")]  # of all, and of the avoidable ones
        self.left_at = ""

    def summarize(self, held: dict[int, str]) -> dict[str, Any]:
        """A row of the event `TransfersMeasured`. Tensors of a watched model are named in `held_as` and not counted as moved again."""
        size, what = self.largest[self.largest[1][0] >= 0]  # of the avoidable tensors, where there are any
        return {
            "line": self.line[0], "text": self.line[1], "call": self.call, "origin": str(self.origin), "target": str(self.target),
            "num": self.num, "num_bytes": self.num_bytes, "ms": self.ns / 1e6, "what": what, "what_bytes": size,
            "num_same": sum(key[0] not in held for key in self.same),
            "num_again": sum(num for key, num in self.again.items() if key[0] not in held),
            "num_back": self.num_back, "num_pageable": self.num_pageable, "left_at": self.left_at,
            "held_as": sorted({held[key[0]] for key in (*self.same, *self.again) if key[0] in held}),
        }  # fmt: skip


class DeviceTransfers:
    """Records transfers from `start` to `stop`, in one thread, with `finish_step` at the end of each step between."""

    def __init__(self, timer: PhaseTimer, models: ModelRegistry) -> None:
        self._timer, self._models = timer, models
        self._patch = TensorMethodPatch(NAMES, self._on_call)
        self._before: dict[tuple[Any, ...], _LineTransfers] | None = None
        self._entries: dict[tuple[Any, ...], _LineTransfers] = {}
        self._came: dict[int, tuple[Any, torch.device, str]] = {}  # tensors that came to the CPU in this step, by address

    def start(self) -> None:
        self._patch.start()

    @property
    def num(self) -> int:
        """The number of transfers in this step so far."""
        return sum(entry.num for entry in self._entries.values())

    def finish_step(self) -> list[dict[str, Any]] | None:
        """End a step. Returns its transfers, longest first; None if the step before was not recorded."""
        self._patch.check()
        is_second = self._before is not None
        self._before, self._entries, self._came = self._entries, {}, {}
        if not is_second:
            return None
        entries = self._before.values()
        held = find_holders(self._models.bodies_that_ran(), {key[0] for entry in entries for key in (*entry.same, *entry.again)})
        return sorted((entry.summarize(held) for entry in entries), key=lambda transfer: -transfer["ms"])

    def stop(self) -> None:
        self._patch.stop()
        self._before, self._entries, self._came = None, {}, {}

    def _on_call(self, call: MethodCall) -> None:
        given = call.args[1] if len(call.args) > 1 else call.kwargs.get("other")
        source, goal = (given, call.args[0]) if call.name == "copy_" else (call.args[0], call.result)
        if not (isinstance(source, Tensor) and isinstance(goal, Tensor)) or source.device == goal.device or call.result is None:
            return
        began = perf_counter_ns()
        frame = direct_user_frame(call.frame, MAX_BETWEEN)
        if frame is not None:
            key = (frame.f_code.co_filename, frame.f_lineno, source.device, goal.device)
            if key not in self._entries and len(self._entries) < MAX_LINES:
                self._entries[key] = _LineTransfers(describe_line(frame), f".{call.name}()", source.device, goal.device)
            if key in self._entries:
                self._add(self._entries[key], self._before.get(key) if self._before else None, source, goal, call)
        self._timer.own_ns += perf_counter_ns() - began

    def _add(self, entry: _LineTransfers, before: _LineTransfers | None, source: Tensor, goal: Tensor, call: MethodCall) -> None:
        size = source.numel() * source.element_size()
        entry.num += 1
        entry.num_bytes += size
        entry.ns += call.ns
        is_avoidable = False
        if goal.is_cpu:
            if goal.numel() and goal.layout is torch.strided:
                self._came[goal.untyped_storage().data_ptr()] = _weak_storage(goal), source.device, entry.line[0]
        elif source.is_cpu and source.layout is torch.strided:
            again = self._is_again(entry, before, source)
            back = graph_task_id() == -1 and self._is_back(entry, source, goal.device)
            pageable = goal.device.type in PINS and _is_non_blocking(call) and not source.is_pinned()
            entry.num_back += back
            entry.num_pageable += pageable
            is_avoidable = again or back or pageable
        what = (size, f"{str(source.dtype).removeprefix('torch.')} {list(source.shape)}")
        for index in range(1 + is_avoidable):
            entry.largest[index] = max(entry.largest[index], what)

    @staticmethod
    def _is_again(entry: _LineTransfers, before: _LineTransfers | None, source: Tensor) -> bool:
        key = (storage_address(source.untyped_storage()), source.storage_offset(), source.shape, source.stride(), source.dtype)
        if key not in entry.moved and len(entry.moved) == MAX_TENSORS:
            return False
        now = _MovedTensor(source)
        then, earlier = before.moved.get(key) if before else None, entry.moved.get(key)
        same, again = (one is not None and one.is_unchanged_in(now) for one in (then, earlier))
        entry.moved[key] = now
        if same:
            entry.same.add(key)
        if again:
            entry.again[key] += 1
        return same or again

    def _is_back(self, entry: _LineTransfers, source: Tensor, device: torch.device) -> bool:
        """Whether a tensor, or the graph that computed it, came from `device` in this step. Not called in backward: tensors that return
        there were offloaded on purpose."""
        storage, came_from, line = self._came.get(source.untyped_storage().data_ptr(), (None, None, ""))
        if storage is not None and not storage.expired() and came_from == device:
            entry.left_at = line
            return True
        if not _is_computed_from(source, device):
            return False
        lines = {line for _, came_from, line in self._came.values() if came_from == device}
        entry.left_at = lines.pop() if len(lines) == 1 else ""
        return True


def _weak_storage(tensor: Tensor) -> Any:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _is_non_blocking(call: MethodCall) -> bool:
    """In every form of these calls, the first positional argument that is a bool is `non_blocking`."""
    return bool(call.kwargs.get("non_blocking") or next((given for given in call.args[1:] if isinstance(given, bool)), False))


def _is_computed_from(tensor: Tensor, device: torch.device) -> bool:
    """Whether the CPU part of the graph of a tensor starts only on `device`. With weights on the CPU, computing there is intended."""
    nodes: list[Any] = [tensor.grad_fn] if tensor.grad_fn is not None else []
    found = False
    for node in nodes:
        for one, _ in node.next_functions:
            made = gradient_device(one)
            if made == device:
                found = True
            elif type(one).__name__ == "AccumulateGrad":
                return False
            elif made is not None and one not in nodes and len(nodes) < MAX_NODES:
                nodes.append(one)
    return found
