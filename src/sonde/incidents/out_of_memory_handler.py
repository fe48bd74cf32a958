"""Out of memory: what was asked for, in which module and on which line, what had filled the memory, and which batch would fit.

It is asked once, of the exception that ended the training, while its traceback still holds the frames. Errors here never reach anybody.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

import sonde
from sonde.capture import process_memory
from sonde.capture.call_site import is_library
from sonde.capture.replay_buffer import ReplayBuffer
from sonde.statistics.tensor_utils import find_tensors, storage_bytes

MAX_CAUSES = 5  # exceptions below an exception that are looked at
MAX_OPERANDS = 6
SAFE = 0.8  # of the room that there seems to be: malloc loses some of it between blocks, and operations need scratch memory
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_SAYS = re.compile(r"can't allocate memory|not enough memory|out of memory|bad_alloc|cannot allocate memory", re.IGNORECASE)
_ASKED = re.compile(r"(?:allocate|buffer size:?) ([\d.]+) ?(bytes|[KMGTP]i?B)", re.IGNORECASE)
_SHAPE = re.compile(r"with shape (\([^)]*\)) and data type (\w+)")
_NAME = re.compile(r"[A-Za-z_]\w*")


def is_out_of_memory(error: BaseException | None) -> BaseException | None:
    """The error itself, or the one below it, that says so; None where none does."""
    for _ in range(MAX_CAUSES):
        if error is None:
            return None
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (isinstance(error, RuntimeError) and _SAYS.search(str(error))):
            return error
        error = error.__cause__ or error.__context__
    return None


def autopsy(
    error: BaseException,
    models: Mapping[str, nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    kept: ReplayBuffer,
    outside_bytes: int = 0,
) -> dict[str, Any]:
    """The data of an `out_of_memory` event. `outside_bytes`: of the heap, what belongs to the program and to no training."""
    message = str(error)
    asked, shape = _ASKED.search(message), _SHAPE.search(message)
    requested = int(float(asked[1]) * _UNITS[asked[2].lower()]) if asked else None
    found: dict[str, Any] = {"requested": requested, "shape": f"{shape[1]} {shape[2]}" if shape else "", "message": message[:500]}
    found |= _scene(error.__traceback__, models)
    found |= _filled(models, optimizers)
    found["batch_size"] = _batch_size(kept)
    room = found.pop("room")
    room = max(0, room - outside_bytes) if room is not None else None
    if found["phase"] in ("forward", "backward") and room is not None and (requested is None or requested < room):
        found["batch_fits"] = _batch_that_fits(kept, room * SAFE)
    return found


def _scene(trace: TracebackType | None, models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Where it was: phase, module, the user's line and the tensors on it."""
    paths = {id(module): f"{name}.{path}".strip(".") for name, model in models.items() for path, module in model.named_modules()}
    scene: dict[str, Any] = {"phase": "", "module": "", "module_type": "", "source": "", "text": "", "operands": []}
    while trace is not None:
        frame, line = trace.tb_frame, trace.tb_lineno
        file = frame.f_code.co_filename
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            scene["phase"] = scene["phase"] or "forward"
            if id(owner) in paths:
                scene |= {"module": paths[id(owner)], "module_type": type(owner).__name__}
        elif file.endswith("autograd/graph.py"):
            scene["phase"] = "backward"
        elif "/torch/optim/" in file and not scene["phase"]:
            scene["phase"] = "optimizer"
        elif "/torch/utils/data/" in file:
            scene["phase"] = "data"
        if not is_library(file):
            text = linecache.getline(file, line).strip()
            scene |= {"source": f"{Path(file).name}:{line}", "text": text, "operands": _operands(frame, text)}
        trace = trace.tb_next
    return scene


def _operands(frame: FrameType, text: str) -> list[str]:
    """Tensors by the names that the line uses: `a [30000, 1] float32`."""
    found = []
    for name in dict.fromkeys(_NAME.findall(text)):
        value = frame.f_locals.get(name)
        if isinstance(value, Tensor):
            found.append(f"{name} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}")
    return found[:MAX_OPERANDS]


def held_bytes(models: Mapping[str, nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, int]:
    """Of the memory, what is known by name."""
    parameters = _held(models)
    gradients = [tensor.grad for tensor in parameters if tensor.is_leaf and tensor.grad is not None]
    states = [value for optimizer in optimizers for state in optimizer.state.values() for _, value in find_tensors(state)]
    return {"parameters": storage_bytes(parameters), "gradients": storage_bytes(gradients), "optimizer_state": storage_bytes(states)}


def _held(models: Mapping[str, nn.Module]) -> list[Tensor]:
    held = [tensor for model in models.values() for tensor in (*model.parameters(), *model.buffers())]
    return [tensor for tensor in held if not nn.parameter.is_lazy(tensor)]


def _filled(models: Mapping[str, nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Any]:
    """What had filled the memory, and how much room a training has there at all."""
    known = held_bytes(models, optimizers)
    device = next((tensor.device for tensor in _held(models) if tensor.device.type == "cuda"), None)
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


def _batch_size(kept: ReplayBuffer) -> int:
    if not kept.calls:
        return 0
    last = kept.calls[-1]
    return next((int(tensor.shape[0]) for _, tensor in find_tensors((last.args, last.kwargs)) if tensor.dim()), 0)


def _batch_that_fits(kept: ReplayBuffer, room: float) -> int | None:
    """The largest batch whose step has room, by fake tensors: they take none. The loss is not known and left out."""
    if not kept.calls or (kept.calls[-1].args and kept.calls[-1].kwargs):
        return None
    last = kept.calls[-1]
    try:
        one = sonde.MemoryProfiler().forecast(last.module, dict(last.kwargs) or tuple(last.args), batch_size=1, check=False)
        if one.measured_size <= 1 or one.measured_bytes <= one.peak_bytes:
            return None
        each = (one.measured_bytes - one.peak_bytes) / (one.measured_size - 1)
        return max(0, min(one.measured_size - 1, 1 + int((room - one.peak_bytes) / each)))
    except Exception:  # there is no memory left, or the model cannot be run with fake tensors: then nothing is said of it
        return None
