"""Reads the events of torch.profiler: operations, and the lines of the user's code that call them. Events are added up, not stored.

torch knows the line from which a function was called, but not the line of an operator such as `x * 2`: those are reported at the first line
of their function. A backward operation is reported at the line of the forward operation that created its node.
"""

import linecache
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sonde.capture.user_source_line import is_library
from sonde.profiler.operation_report import OperationCost, OperationSite
from sonde.statistics.private_torch_api import ProfilerEventType, RecordScope

ENGINE = "autograd::engine::evaluate_function: "
STEP = "ProfilerStep#"
RUNNER_FILE = "sonde/profiler/profile_operations.py"
PHASES = {"run_forward": "forward", "run_loss": "loss", "run_backward": "backward", "run_update": "optimizer"}  # by function of that file
MAX_SITES = 8  # of one operation


class CallPosition(NamedTuple):
    """Position of an event in the call tree: the nearest line of the user's code, the innermost layer, the phase."""

    file: str = ""
    line: int = 0
    layer: str = ""
    phase: str = "data"  # everything outside of the other phases


@dataclass(slots=True)
class OperationCall:
    """One call of one operation."""

    name: str
    position: CallPosition
    sequence: int  # of a backward operation: number of the forward operation that created its node; -1 in the forward
    total_ns: int
    self_ns: int
    fields: Any  # of torch's event: the inputs
    memory_bytes: int = 0
    flops: int = 0


@dataclass(slots=True)
class OperationTotal:
    """All calls of one operation at one position."""

    num: int = 0
    total_ns: int = 0
    self_ns: int = 0
    memory_bytes: int = 0
    flops: int = 0
    longest_ns: int = -1  # of one call, by self time
    shapes: str = ""  # of the inputs of that call

    def add(self, call: OperationCall) -> None:
        self.num += 1
        self.total_ns += call.total_ns
        self.self_ns += call.self_ns
        self.memory_bytes += call.memory_bytes
        self.flops += call.flops
        if call.self_ns > self.longest_ns:
            self.longest_ns = call.self_ns
            self.shapes = ", ".join(str(one.sizes) for one in call.fields.inputs if hasattr(one, "sizes"))


@dataclass(slots=True)
class ProfilerEvents:
    """The totals of all operations, the duration of each step, and the peak memory."""

    totals: dict[tuple[str, CallPosition], OperationTotal] = field(default_factory=dict)
    steps_ns: list[int] = field(default_factory=list)
    peak_bytes: int = 0

    def add(self, results: Any, layers: Mapping[int, str]) -> int:
        """Adds the results of Kineto. `layers` are the paths of the modules by `id(module)`. Returns the number of events."""
        calls, num_events = _read_calls(self, results, layers)
        for call in calls:
            self.totals.setdefault((call.name, call.position), OperationTotal()).add(call)
        return num_events


def _read_calls(events: ProfilerEvents, results: Any, layers: Mapping[int, str]) -> tuple[list[OperationCall], int]:
    """The calls of all operations, and the number of all events. Steps and memory go to `events`."""
    calls: list[OperationCall] = []
    num_events = 0
    flops = {event.correlation_id(): event.flops() for event in results.events() if event.flops()}
    forward_positions: dict[int, CallPosition] = {}  # by sequence number
    stack: list[tuple[Any, CallPosition, OperationCall | None, bool]] = [
        (root, CallPosition(), None, False) for root in results.experimental_event_tree()[::-1]
    ]
    while stack:
        event, position, parent, in_backward = stack.pop()
        num_events += 1
        kind, fields = event.typed
        if kind == ProfilerEventType.Allocation:
            if parent is not None and fields.alloc_size > 0:
                parent.memory_bytes += fields.alloc_size
            events.peak_bytes = max(events.peak_bytes, int(fields.total_allocated or 0))
        elif kind in (ProfilerEventType.PyCall, ProfilerEventType.PyCCall):
            position = _inside_call(position, fields, layers)
        elif kind == ProfilerEventType.TorchOp:
            if fields.scope == RecordScope.USER_SCOPE:
                if event.name.startswith(STEP):
                    events.steps_ns.append(event.duration_time_ns)
            else:
                in_backward = in_backward or fields.scope == RecordScope.BACKWARD_FUNCTION or event.name.startswith(ENGINE)
                sequence = _sequence(fields, parent, in_backward)
                if not in_backward and fields.sequence_number >= 0:
                    forward_positions[fields.sequence_number] = position
                duration = event.duration_time_ns
                call = OperationCall(event.name, position, sequence, duration, duration, fields)
                call.flops = flops.get(event.correlation_id, 0)
                if parent is not None:
                    parent.self_ns -= duration
                calls.append(call)
                parent = call
        stack.extend((child, position, parent, in_backward) for child in event.children[::-1])
    for call in calls:
        if call.sequence >= 0 or call.position.phase == "backward":
            call.position = forward_positions.get(call.sequence, call.position)._replace(phase="backward")
    return calls, num_events


def _sequence(fields: Any, parent: OperationCall | None, in_backward: bool) -> int:
    """Operations inside a backward operation have its sequence number."""
    if not in_backward:
        return -1
    own = int(fields.sequence_number) if fields.scope == RecordScope.BACKWARD_FUNCTION or parent is None else -1
    return own if own >= 0 else parent.sequence if parent is not None else int(fields.sequence_number)


def _inside_call(position: CallPosition, fields: Any, layers: Mapping[int, str]) -> CallPosition:
    caller, callee = fields.caller, getattr(fields, "callsite", None)
    if callee is not None and callee.file_name.endswith(RUNNER_FILE):
        # The line that called profile_operations is not the line of an operation.
        position = position._replace(file="", line=0, phase=PHASES.get(callee.function_name, position.phase))
    elif callee is not None and _is_user_code(callee.file_name):
        position = position._replace(file=callee.file_name, line=callee.line_number)
    elif _is_user_code(caller.file_name):
        position = position._replace(file=caller.file_name, line=caller.line_number)
    module = getattr(fields, "module", None)
    if module is not None and module.self_ptr in layers:
        position = position._replace(layer=layers[module.self_ptr])
    return position


@cache
def _absolute_path(name: str) -> str:
    """torch removes entries of sys.path from the start of file names."""
    if Path(name).is_absolute():
        return name
    return next((str(path) for entry in sys.path if (path := Path(entry or ".") / name).is_file()), "")


@cache
def _is_user_code(name: str) -> bool:
    path = "" if name.startswith("<") else _absolute_path(name)
    return bool(path) and not is_library(str(Path(path).absolute()))


def operation_costs(events: ProfilerEvents, num_batches: int) -> Iterator[OperationCost]:
    """The cost of each operation per batch, the one with the most self time first."""
    total_ns = sum(total.self_ns for total in events.totals.values()) or 1
    groups: dict[str, list[tuple[str, CallPosition, OperationTotal]]] = {}
    for (name, position), total in events.totals.items():
        groups.setdefault(name.removeprefix(ENGINE), []).append((name, position, total))
    for name, found in sorted(groups.items(), key=lambda item: -sum(total.self_ns for *_, total in item[1])):
        totals = [total for *_, total in found]
        self_ns = sum(total.self_ns for total in totals)
        # The engine's event and the node inside it are one call.
        outer = [total for full_name, _, total in found if not full_name.startswith(ENGINE)] or totals
        yield OperationCost(
            name=name, calls=sum(total.num for total in outer) / num_batches, self_ms=self_ns / num_batches / 1e6,
            total_ms=sum(total.total_ns for total in outer) / num_batches / 1e6, share=self_ns / total_ns,
            memory_bytes=sum(total.memory_bytes for total in totals) // num_batches,
            flops=sum(total.flops for total in totals) // num_batches,
            places=tuple(_sites([(position, total) for _, position, total in found], num_batches)),
        )  # fmt: skip


def _sites(found: list[tuple[CallPosition, OperationTotal]], num_batches: int) -> Iterator[OperationSite]:
    groups: dict[CallPosition, list[OperationTotal]] = {}
    for position, total in found:
        groups.setdefault(position, []).append(total)
    for position, totals in sorted(groups.items(), key=lambda item: -sum(total.self_ns for total in item[1]))[:MAX_SITES]:
        path = _absolute_path(position.file) if position.file else ""
        yield OperationSite(
            line=f"{Path(path).name}:{position.line}" if path else "", text=linecache.getline(path, position.line).strip() if path else "",
            layer=position.layer, phase=position.phase, self_ms=sum(total.self_ns for total in totals) / num_batches / 1e6,
            shapes=max(totals, key=lambda total: total.longest_ns).shapes,
        )  # fmt: skip
