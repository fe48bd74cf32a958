"""Out of memory: what was requested, in which module and on which line, what had filled the memory, and which batch would fit.

Computed once, from the exception that ended the training, while its traceback still holds the frames.
"""

import linecache
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from sonde.capture import process_memory
from sonde.capture.step_inputs_for_replay import ReplayBuffer
from sonde.capture.user_source_line import is_library, read_locals
from sonde.events import MemoryExhausted
from sonde.memory_profiler.memory_profiler import MemoryProfiler
from sonde.replay.forked_child import run_in_child
from sonde.statistics.find_tensors import find_tensors, materialized_tensors, memory_by_category

MAX_CAUSES = 5  # exceptions below an exception that are looked at
MAX_OPERANDS = 6
FORECAST_S = 10.0  # seconds that the forecast for a smaller batch may take
SAFE = 0.8  # of the room that there seems to be: malloc loses some of it between blocks, and operations need scratch memory
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_OUT_OF_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory|bad_alloc|cannot allocate memory", re.IGNORECASE)
_REQUESTED = re.compile(r"(?:allocate|buffer size:?) ([\d.]+) ?(bytes|[KMGTP]i?B)", re.IGNORECASE)
_SHAPE = re.compile(r"with shape (\([^)]*\)) and data type (\w+)")
_NAME = re.compile(r"[A-Za-z_]\w*")


def find_out_of_memory(error: BaseException | None) -> BaseException | None:
    """The error itself, or the one below it, that says so; None where none does."""
    for _ in range(MAX_CAUSES):
        if error is None:
            return None
        is_message = isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error))
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or is_message:
            return error
        error = error.__cause__ or error.__context__
    return None


def explain_out_of_memory(
    error: BaseException, models: Mapping[str, nn.Module], optimizers: Iterable[torch.optim.Optimizer], buffer: ReplayBuffer,
    outside_bytes: int = 0,
) -> MemoryExhausted:  # fmt: skip
    """The event. `outside_bytes`: of the heap, what belongs to the program and to no training."""
    message = str(error)
    asked, shape = _REQUESTED.search(message), _SHAPE.search(message)
    requested = int(float(asked[1]) * _UNITS[asked[2].lower()]) if asked else None
    place, usage = _locate(error.__traceback__, models), _usage(models, optimizers)
    room = usage.pop("room")
    room = max(0, room - outside_bytes) if room is not None else None
    batch_fits = None
    if place["phase"] in ("forward", "backward") and room is not None and (requested is None or requested < room):
        batch_fits = _batch_that_fits(buffer, room * SAFE)
    return MemoryExhausted(
        requested=requested, shape=f"{shape[1]} {shape[2]}" if shape else "", message=message[:500], **place, **usage,
        batch_size=_batch_size(buffer), batch_fits=batch_fits,
    )  # fmt: skip


def _locate(trace: TracebackType | None, models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Where it happened: phase, module, the user's line and the tensors on it."""
    paths = {id(module): f"{name}.{path}".strip(".") for name, model in models.items() for path, module in model.named_modules()}
    place: dict[str, Any] = {"phase": "", "module": "", "module_type": "", "source": "", "text": "", "operands": []}
    while trace is not None:
        frame, line = trace.tb_frame, trace.tb_lineno
        file = frame.f_code.co_filename
        owner = read_locals(frame).get("self")
        if isinstance(owner, nn.Module):
            place["phase"] = place["phase"] or "forward"
            if id(owner) in paths:
                place |= {"module": paths[id(owner)], "module_type": type(owner).__name__}
        elif file.endswith("autograd/graph.py"):
            place["phase"] = "backward"
        elif "/torch/optim/" in file and not place["phase"]:
            place["phase"] = "optimizer"
        elif "/torch/utils/data/" in file:
            place["phase"] = "data"
        if not is_library(file):
            text = linecache.getline(file, line).strip()
            place |= {"source": f"{Path(file).name}:{line}", "text": text, "operands": _operands(frame, text)}
        trace = trace.tb_next
    return place


def _operands(frame: FrameType, text: str) -> list[str]:
    """Tensors by the names that the line uses: `a [30000, 1] float32`."""
    found, variables = [], read_locals(frame)
    for name in dict.fromkeys(_NAME.findall(text)):
        value = variables.get(name)
        if isinstance(value, Tensor):
            found.append(f"{name} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}")
    return found[:MAX_OPERANDS]


def _usage(models: Mapping[str, nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Any]:
    """What had filled the memory, and how much room a training has there at all."""
    known = memory_by_category(models, optimizers)
    device = next((tensor.device for tensor in materialized_tensors(models) if tensor.device.type == "cuda"), None)
    if device is not None:  # not tried on a machine with one
        in_use = torch.cuda.memory_allocated(device)
        free, total = torch.cuda.mem_get_info(device)
        room: int | None = free + torch.cuda.memory_reserved(device)
        limit: process_memory.Limit | None = process_memory.Limit(total, str(device))
    else:
        heap, resident, limit = process_memory.heap(), process_memory.rss() or 0, process_memory.limit()
        in_use = heap.used if heap is not None else resident
        room = max(0, limit.num_bytes - resident) + in_use if limit is not None else None
    rest = max(0, in_use - sum(known.values()))
    return {
        **known, "rest": rest, "in_use": in_use, "room": room,
        "limit": limit.num_bytes if limit else None, "limit_by": limit.by if limit else "",
    }  # fmt: skip


def _batch_size(buffer: ReplayBuffer) -> int:
    inputs = (tensor for call in list(buffer.calls)[-1:] for _, tensor in find_tensors((call.args, call.kwargs)))
    return next((int(tensor.shape[0]) for tensor in inputs if tensor.dim()), 0)


def _batch_that_fits(buffer: ReplayBuffer, room: float) -> int | None:
    """The largest batch whose step has room, by fake tensors: they take none. The loss is not known and left out. The model runs in a child
    process: it is code of the user."""
    if not buffer.calls or (buffer.calls[-1].args and buffer.calls[-1].kwargs):
        return None
    last = buffer.calls[-1]

    def forecast(preliminary: Any) -> dict[str, int]:
        one = MemoryProfiler().forecast(last.module, dict(last.kwargs) or tuple(last.args), batch_size=1, check=False)
        return {"measured_size": one.measured_size, "measured_bytes": one.measured_bytes, "peak_bytes": one.peak_bytes}

    one = run_in_child(forecast, limit_s=FORECAST_S).data
    if one is None:  # there is no memory left, or the model cannot be run with fake tensors: then nothing is said of it
        return None
    size, whole, peak = int(one["measured_size"]), int(one["measured_bytes"]), int(one["peak_bytes"])
    if size <= 1 or whole <= peak:
        return None
    return max(0, min(size - 1, 1 + int((room - peak) / ((whole - peak) / (size - 1)))))
