"""Finds the tensors in arguments and results, models and optimizers; reads a single number without waiting for a device."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from sonde.statistics import reductions
from sonde.statistics.batched_device_reads import on_device
from sonde.statistics.private_torch_api import storage_address
from sonde.statistics.statistics_without_extension import measurable

MAX_DEPTH = 8
MAX_LEAVES = 64


def find_tensors(value: Any) -> list[tuple[str, torch.Tensor]]:
    """Find the tensors in nested tuples, lists, mappings and dataclasses, to a bounded depth and number. Iterators are never consumed.
    Returns pairs of path and tensor: `("0", tensor)`, `("hidden.1", tensor)`."""
    if type(value) is torch.Tensor:  # the output of most modules
        return [("0", value)]
    return list(_walk(value, "", 0, [MAX_LEAVES], set()))


def _walk(value: Any, path: str, depth: int, left: list[int], visited: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if left[0] <= 0 or depth > MAX_DEPTH:
        return
    if isinstance(value, torch.Tensor):
        left[0] -= 1
        yield path or "0", value
        return
    if isinstance(value, (str, bytes, int, float, bool)) or value is None or id(value) in visited:
        return
    items: Iterator[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = iter(value.items())
    elif isinstance(value, (tuple, list)):
        items = iter(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    else:
        return
    visited.add(id(value))  # a container may contain itself
    for key, item in items:
        yield from _walk(item, f"{path}.{key}" if path else str(key), depth + 1, left, visited)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape. Of a strided nested tensor, whose `shape` and `len()` raise, the number of its parts alone."""
    return (tensor.size(0),) if tensor.is_nested and tensor.layout is torch.strided else tuple(tensor.shape)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of these tensors; a storage that several of them share counts once."""
    num_bytes: dict[int, int] = {}
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
            num_bytes[storage_address(storage)] = storage.nbytes()
        except Exception:  # sparse tensors and some subclasses have no storage
            continue
    return sum(num_bytes.values())


def memory_by_category(models: Mapping[str, torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, int]:
    """Bytes of `parameters` (with buffers), `gradients` and `optimizer_state`."""
    parameters = materialized_tensors(models)
    gradients = [tensor.grad for tensor in parameters if tensor.is_leaf and tensor.grad is not None]
    states = optimizer_state_tensors(optimizers)
    return {"parameters": storage_bytes(parameters), "gradients": storage_bytes(gradients), "optimizer_state": storage_bytes(states)}


def materialized_tensors(models: Mapping[str, torch.nn.Module]) -> list[torch.Tensor]:
    """Parameters and buffers, without those of lazy modules that have not run."""
    held = [tensor for model in models.values() for tensor in (*model.parameters(), *model.buffers())]
    return [tensor for tensor in held if not torch.nn.parameter.is_lazy(tensor)]


def optimizer_state_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    return [tensor for optimizer in optimizers for state in optimizer.state.values() for _, tensor in find_tensors(state)]


def numpy_view(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The elements of a CPU tensor, not copied. `Tensor.numpy()` would forbid to resize its storage for good: FSDP2, which frees those
    of its parameters, and `resize_` of the user would fail."""
    return np.from_dlpack(tensor.detach())


def read_scalar(value: Any) -> float | None:
    """A number or a one-element CPU tensor as a float, without a torch operation where possible. Returns None for tensors of several
    elements, on a device, where reading would wait, and of a subclass that cannot be read."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or on_device(value):
            return None
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return _read_subclass(value)
        number = reductions.read_element(value)
        if number is not None:
            return number
        value = value.detach()
        value = numpy_view(value if value.dtype in (torch.float32, torch.float64, torch.int64) else value.to(torch.float64)).reshape(())
    return float(value)


def _read_subclass(value: torch.Tensor) -> float | None:
    try:
        with torch.no_grad():
            return float(measurable(value).item())
    except Exception:  # of the user's class, or a tensor without values
        return None
