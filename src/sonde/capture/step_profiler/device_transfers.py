"""Transfers of tensors between devices: at which lines, how many bytes, and whether they are needed.

Two steps in a row are recorded: the profiled one and, where it moved anything, the next. The transfers of the second one are reported, and
which of them the first had made too: a batch is another tensor in each step, a constant is the same one with the same content. Steps that
are farther apart cannot be compared, since a loader hands out the same data again. Nothing is kept alive for that.
Tested on the meta device and on a device written in Python, not with a real accelerator.
"""

from __future__ import annotations

from collections import Counter
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sonde.capture.call_site import describe_line, direct_user_frame
from sonde.capture.device_placement import find_holders
from sonde.capture.model_registry import ModelRegistry
from sonde.capture.patches import MethodCall, TensorMethodPatch
from sonde.capture.phase_timer import PhaseTimer
from sonde.statistics.fingerprint import content_hash
from sonde.statistics.torch_internals import gradient_device, graph_task_id, storage_address, tensor_version

NAMES = ("to", "cuda", "xpu", "cpu", "copy_")
PINS = ("cuda",)  # devices that copy from pinned memory by themselves, while Python goes on; from any other Python is held up
MAX_PLACES = 64
MAX_TENSORS = 64  # of one line that are told apart
MAX_NODES = 256  # of a graph that are gone through for where a tensor came from
MAX_BETWEEN = 4  # frames of libraries between a line and the call, as in batch.to(device); what is farther away they do of themselves

_Key = tuple[int, Any, torch.Size, tuple[int, ...], torch.dtype]


class Transfer(NamedTuple):
    """What one line moved between two devices in one step."""

    line: str
    text: str
    call: str  # ".to()"
    origin: str  # "cpu"
    target: str  # "cuda:0"
    num: int
    num_bytes: int
    ms: float  # that the calls took, with what they waited for
    what: str  # the largest tensor that gave reason to speak of the line, or else the largest: "float32 [10, 512]"
    what_bytes: int
    num_same: int  # tensors that the step before had moved here too, with the same contents
    num_again: int  # times that a tensor was moved that this step had moved here before, with the same contents
    num_back: int  # that had come from there in this step
    num_pageable: int  # that were to be copied while Python goes on, and could not
    left_at: str  # the line that had brought what came back, where it is known
    held_as: list[str]  # those of them that a watched model holds, which are not counted in num_same and num_again


class _Moved:
    """A tensor on the CPU that went to a device, without keeping it."""

    __slots__ = ("fingerprint", "storage", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.storage = _weak_storage(tensor)  # while we have it, the same address is the same storage
        self.version = -1 if tensor.is_inference() else tensor_version(tensor)
        self.fingerprint = content_hash(tensor)  # numpy may write into it, and no version tells

    def is_unchanged_in(self, other: _Moved) -> bool:
        alike = self.version == other.version and self.fingerprint == other.fingerprint
        return alike and self.fingerprint is not None and not self.storage.expired()


class _Place:
    """A line that moves tensors between two devices, in one step."""

    def __init__(self, line: tuple[str, str], call: str, origin: torch.device, target: torch.device) -> None:
        self.line, self.call, self.origin, self.target = line, call, origin, target
        self.num = self.num_bytes = self.ns = self.num_back = self.num_pageable = 0
        self.moved: dict[_Key, _Moved] = {}
        self.same: set[_Key] = set()
        self.again: Counter[_Key] = Counter()
        self.largest = [(-1, ""), (-1, "")]  # of all, and of those that give reason to speak
        self.left_at = ""

    def summarize(self, held: dict[int, str]) -> Transfer:
        size, what = self.largest[self.largest[1][0] >= 0]
        num_same = sum(key[0] not in held for key in self.same)
        num_again = sum(num for key, num in self.again.items() if key[0] not in held)
        held_as = sorted({held[key[0]] for key in (*self.same, *self.again) if key[0] in held})
        return Transfer(
            *self.line, self.call, str(self.origin), str(self.target), self.num, self.num_bytes, self.ns / 1e6, what, size,
            num_same, num_again, self.num_back, self.num_pageable, self.left_at, held_as,
        )  # fmt: skip


class DeviceTransfers:
    """Records transfers from `start` to `stop`, in one thread, with `finish_step` at the end of each step between."""

    def __init__(self, timer: PhaseTimer, models: ModelRegistry) -> None:
        self._timer, self._models = timer, models
        self._patch = TensorMethodPatch(NAMES, self._on_call)
        self._before: dict[tuple[Any, ...], _Place] | None = None
        self._places: dict[tuple[Any, ...], _Place] = {}
        self._came: dict[int, tuple[Any, torch.device, str]] = {}  # to the CPU in this step, by its address there

    def start(self) -> None:
        self._patch.start()

    @property
    def num(self) -> int:
        """Of what this step has moved so far."""
        return sum(place.num for place in self._places.values())

    def finish_step(self) -> list[Transfer] | None:
        """A step is over. What it moved, the longest first; None where the step before was not listened to."""
        self._patch.check()
        places = self._places
        held = find_holders(self._models.bodies_that_ran(), {key[0] for place in places.values() for key in (*place.same, *place.again)})
        summaries = [place.summarize(held) for place in places.values()] if self._before is not None else None
        self._before, self._places, self._came = places, {}, {}
        return None if summaries is None else sorted(summaries, key=lambda transfer: -transfer.ms)

    def stop(self) -> None:
        self._patch.stop()
        self._before, self._places, self._came = None, {}, {}

    # -- one call ----------------------------------------------------------------------------------

    def _on_call(self, call: MethodCall) -> None:
        given = call.args[1] if len(call.args) > 1 else call.kwargs.get("other")
        source, goal = (given, call.args[0]) if call.name == "copy_" else (call.args[0], call.result)
        if not (isinstance(source, Tensor) and isinstance(goal, Tensor)) or source.device == goal.device or call.result is None:
            return
        began = perf_counter_ns()
        frame = direct_user_frame(call.frame, MAX_BETWEEN)
        if frame is not None:
            key = (frame.f_code.co_filename, frame.f_lineno, source.device, goal.device)
            place = self._places.get(key)
            if place is None and len(self._places) < MAX_PLACES:
                place = self._places[key] = _Place(describe_line(frame), f".{call.name}()", source.device, goal.device)
            if place is not None:
                before = self._before.get(key) if self._before else None
                self._add(place, before, source, goal, call)
        self._timer.own_ns += perf_counter_ns() - began

    def _add(self, place: _Place, before: _Place | None, source: Tensor, goal: Tensor, call: MethodCall) -> None:
        size = source.numel() * source.element_size()
        place.num += 1
        place.num_bytes += size
        place.ns += call.ns
        is_avoidable = False
        if goal.is_cpu:
            if goal.numel() and goal.layout is torch.strided:
                self._came[goal.untyped_storage().data_ptr()] = _weak_storage(goal), source.device, place.line[0]
        elif source.is_cpu and source.layout is torch.strided:
            again = self._is_again(place, before, source)
            back = graph_task_id() == -1 and self._is_back(place, source, goal.device)
            pageable = goal.device.type in PINS and _is_non_blocking(call) and not source.is_pinned()
            place.num_back += back
            place.num_pageable += pageable
            is_avoidable = again or back or pageable
        what = (size, f"{str(source.dtype).removeprefix('torch.')} {list(source.shape)}")
        for index in range(1 + is_avoidable):
            place.largest[index] = max(place.largest[index], what)

    @staticmethod
    def _is_again(place: _Place, before: _Place | None, source: Tensor) -> bool:
        key = (storage_address(source.untyped_storage()), source.storage_offset(), source.shape, source.stride(), source.dtype)
        if key not in place.moved and len(place.moved) == MAX_TENSORS:
            return False
        now = _Moved(source)
        then, earlier = before.moved.get(key) if before else None, place.moved.get(key)
        same, again = (one is not None and one.is_unchanged_in(now) for one in (then, earlier))
        place.moved[key] = now
        if same:
            place.same.add(key)
        if again:
            place.again[key] += 1
        return same or again

    def _is_back(self, place: _Place, source: Tensor, device: torch.device) -> bool:
        """Its memory, or the graph that it was computed by, came from there. What is brought back in backward was kept out of the way on
        purpose, and nobody asks that."""
        storage, came_from, line = self._came.get(source.untyped_storage().data_ptr(), (None, None, ""))
        if storage is not None and not storage.expired() and came_from == device:
            place.left_at = line
            return True
        if not _is_computed_from(source, device):
            return False
        lines = {line for _, came_from, line in self._came.values() if came_from == device}
        place.left_at = lines.pop() if len(lines) == 1 else ""
        return True


def _weak_storage(tensor: Tensor) -> Any:
    """Its storage, which may go all the same."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _is_non_blocking(call: MethodCall) -> bool:
    """In every form of these calls, the first positional argument that is a bool is `non_blocking`."""
    return bool(call.kwargs.get("non_blocking") or next((given for given in call.args[1:] if isinstance(given, bool)), False))


def _is_computed_from(tensor: Tensor, device: torch.device) -> bool:
    """Does its graph, as far as it is on the CPU, begin on that device alone? With weights that are on the CPU it is computed there on
    purpose."""
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
