"""What torch.profiler recorded, read as operations and the places that call them.

torch keeps a tree of events: calls of Python functions, of C functions, operations, allocations. It knows the line from which a function
was called, but not the line of an operator such as `x * 2`: for those the line of the function's head is said. Backward operations carry
the number of the forward operation that made their node, and are at its place.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from torch._C._profiler import RecordScope, _EventType

from sonde.capture.call_site import is_library
from sonde.profiler.operation_report import OperationCost, Place

ENGINE = "autograd::engine::evaluate_function: "
STEP = "ProfilerStep#"
OURS = "sonde/profiler/operations.py"
PHASES = {"run_forward": "forward", "run_loss": "loss", "run_backward": "backward", "run_update": "optimizer"}  # functions there
MAX_PLACES = 8  # of one operation
_USER_SCOPES = (RecordScope.USER_SCOPE,)


class Spot(NamedTuple):
    """Where the walk is: the nearest line of the user's, the innermost layer, the phase."""

    file: str = ""
    line: int = 0
    layer: str = ""
    phase: str = "data"  # what is in no other phase


@dataclass(slots=True)
class Call:
    """One call of one operation."""

    name: str
    spot: Spot
    sequence: int  # of a backward operation: which forward operation made its node; -1 where it is none
    total_ns: int
    self_ns: int
    memory_bytes: int = 0
    flops: int = 0
    shapes: str = ""


@dataclass(slots=True)
class Reading:
    """Everything that the tree says."""

    calls: list[Call] = field(default_factory=list)
    steps_ns: list[int] = field(default_factory=list)
    peak_bytes: int = 0


def read(results: Any, layers: Mapping[int, str]) -> Reading:
    """From the results of Kineto and the layers' paths by `id(module)`."""
    reading = Reading()
    flops = {event.correlation_id(): event.flops() for event in results.events() if event.flops()}
    made: dict[int, Spot] = {}  # by sequence number: where the forward operation is
    stack: list[tuple[Any, Spot, Call | None, bool]] = [(root, Spot(), None, False) for root in results.experimental_event_tree()[::-1]]
    while stack:
        event, spot, around, backward = stack.pop()
        kind, facts = event.typed
        if kind == _EventType.Allocation:
            if around is not None and facts.alloc_size > 0:
                around.memory_bytes += facts.alloc_size
            reading.peak_bytes = max(reading.peak_bytes, int(facts.total_allocated or 0))
        elif kind in (_EventType.PyCall, _EventType.PyCCall):
            spot = _moved(spot, facts, layers)
        elif kind == _EventType.TorchOp:
            if facts.scope in _USER_SCOPES:
                if event.name.startswith(STEP):
                    reading.steps_ns.append(event.duration_time_ns)
            else:
                backward = backward or facts.scope == RecordScope.BACKWARD_FUNCTION or event.name.startswith(ENGINE)
                sequence = _sequence(facts, around, backward)
                if not backward and facts.sequence_number >= 0:
                    made[facts.sequence_number] = spot
                call = Call(event.name, spot, sequence, event.duration_time_ns, event.duration_time_ns)
                call.flops, call.shapes = flops.get(event.correlation_id, 0), _shapes(facts)
                if around is not None:
                    around.self_ns -= event.duration_time_ns
                reading.calls.append(call)
                around = call
        stack.extend((child, spot, around, backward) for child in event.children[::-1])
    for call in reading.calls:
        if call.sequence >= 0 or call.spot.phase == "backward":
            call.spot = made.get(call.sequence, call.spot)._replace(phase="backward")
    return reading


def _sequence(facts: Any, around: Call | None, backward: bool) -> int:
    """Operations inside a backward operation are at its place."""
    if not backward:
        return -1
    own = int(facts.sequence_number) if facts.scope == RecordScope.BACKWARD_FUNCTION or around is None else -1
    return own if own >= 0 else around.sequence if around is not None else int(facts.sequence_number)


def _moved(spot: Spot, facts: Any, layers: Mapping[int, str]) -> Spot:
    """The spot inside of a Python call."""
    caller, callee = facts.caller, getattr(facts, "callsite", None)
    if callee is not None and callee.file_name.endswith(OURS):
        # The line that asked for a profile is not what makes an operation slow.
        spot = spot._replace(file="", line=0, phase=PHASES.get(callee.function_name, spot.phase))
    elif callee is not None and _is_users(callee.file_name):
        spot = spot._replace(file=callee.file_name, line=callee.line_number)
    elif _is_users(caller.file_name):
        spot = spot._replace(file=caller.file_name, line=caller.line_number)
    module = getattr(facts, "module", None)
    if module is not None and module.self_ptr in layers:
        spot = spot._replace(layer=layers[module.self_ptr])
    return spot


@cache
def _path(name: str) -> str:
    """torch cuts off what the module search path begins with."""
    if Path(name).is_absolute():
        return name
    return next((str(path) for entry in sys.path if (path := Path(entry or ".") / name).is_file()), "")


@cache
def _is_users(name: str) -> bool:
    path = "" if name.startswith("<") else _path(name)
    return bool(path) and not is_library(str(Path(path).absolute()))


def _shapes(facts: Any) -> str:
    return ", ".join(str(one.sizes) for one in facts.inputs if hasattr(one, "sizes"))


def costs(reading: Reading, num_batches: int) -> Iterator[OperationCost]:
    """One row per operation, by the time that they take themselves."""
    whole_ns = sum(call.self_ns for call in reading.calls) or 1
    groups: dict[str, list[Call]] = {}
    for call in reading.calls:
        groups.setdefault(call.name.removeprefix(ENGINE) if call.name.startswith(ENGINE) else call.name, []).append(call)
    for name, calls in sorted(groups.items(), key=lambda item: -sum(call.self_ns for call in item[1])):
        self_ns = sum(call.self_ns for call in calls)
        outer = [call for call in calls if not call.name.startswith(ENGINE)] or calls  # the engine's turn and the node are one call
        yield OperationCost(
            name=name, calls=len(outer) / num_batches, self_ms=self_ns / num_batches / 1e6,
            total_ms=sum(call.total_ns for call in outer) / num_batches / 1e6, share=self_ns / whole_ns,
            memory_bytes=sum(call.memory_bytes for call in calls) // num_batches, flops=sum(call.flops for call in calls) // num_batches,
            places=tuple(_places(calls, num_batches)),
        )  # fmt: skip


def _places(calls: list[Call], num_batches: int) -> Iterator[Place]:
    groups: dict[Spot, list[Call]] = {}
    for call in calls:
        groups.setdefault(call.spot, []).append(call)
    for spot, some in sorted(groups.items(), key=lambda item: -sum(call.self_ns for call in item[1]))[:MAX_PLACES]:
        path = _path(spot.file) if spot.file else ""
        yield Place(
            line=f"{Path(path).name}:{spot.line}" if path else "", text=linecache.getline(path, spot.line).strip() if path else "",
            layer=spot.layer, phase=spot.phase, self_ms=sum(call.self_ns for call in some) / num_batches / 1e6,
            shapes=max(some, key=lambda call: call.self_ns).shapes,
        )  # fmt: skip
