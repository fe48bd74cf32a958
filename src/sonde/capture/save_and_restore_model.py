"""Restores all state that a tool changes when it runs a model of the user: the profiler, the tools, a replay in the training process.

Restored are the random generators, buffers, attributes of modules, training flags, grad mode, autocast, the default dtype and gradients.
The values of parameters are not copied: a forward and a backward only read them.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sonde.statistics.private_torch_api import preserve_versions

_CONTAINERS = (list, dict, set)  # a forward may fill them: their items are restored, one level deep


@contextmanager
def state_restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restores the state of the modules and their submodules, and torch's global state, on exit."""
    every = list({id(part): part for module in modules for part in module.modules()}.values())
    tensors = _tensors(every)
    with ExitStack() as undo:
        if tensors:  # the training's graph may have saved a buffer, and its backward checks the version counter
            undo.enter_context(preserve_versions(tuple(tensors)))
        undo.callback(torch.set_default_dtype, torch.get_default_dtype())
        undo.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        for device in ("cpu", "cuda"):
            undo.callback(torch.set_autocast_enabled, device, torch.is_autocast_enabled(device))
            undo.callback(torch.set_autocast_dtype, device, torch.get_autocast_dtype(device))
        _restore_generators(undo)
        for part in every:
            undo.callback(_restore_attributes, part, _attributes_of(part))
        for tensor in tensors:
            undo.callback(_restore_values, tensor, tensor.detach().clone())
        for part in every:
            for p in part._parameters.values():
                if p is not None and not nn.parameter.is_lazy(p) and p.is_leaf:
                    undo.callback(setattr, p, "grad", p.grad)
        yield


def _attributes_of(part: nn.Module) -> dict[str, Any]:
    """The attributes of a module, each with a copy of its items if it is a container."""
    return {name: (value, type(value)(value)) if type(value) in _CONTAINERS else (value, None) for name, value in part.__dict__.items()}


def _restore_attributes(part: nn.Module, state: dict[str, Any]) -> None:
    for name in [name for name in part.__dict__ if name not in state]:
        del part.__dict__[name]
    for name, (value, content) in state.items():
        part.__dict__[name] = value
        if content is not None:
            _refill(value, content)


def _refill(container: Any, content: Any) -> None:
    items, saved = (chain(*each.items()) if isinstance(each, dict) else each for each in (container, content))
    if len(container) == len(content) and all(a is b for a, b in zip(items, saved)):
        return
    container.clear()
    container.extend(content) if isinstance(container, list) else container.update(content)


def _tensors(every: list[nn.Module]) -> list[Tensor]:
    """Buffers, and tensors in attributes of modules: a forward may change both in place."""
    found: dict[int, Tensor] = {}
    for part in every:
        for value in (*part._buffers.values(), *part.__dict__.values()):
            if isinstance(value, Tensor) and not nn.parameter.is_lazy(value) and value.layout == torch.strided and not value.is_inference():
                found[id(value)] = value
    return list(found.values())


def _restore_values(tensor: Tensor, content: Tensor) -> None:
    # Unconditional: batch norm changes its running statistics without incrementing their version counter.
    with torch.no_grad():
        tensor.detach().copy_(content)


def _restore_generators(undo: ExitStack) -> None:
    undo.callback(torch.set_rng_state, torch.get_rng_state())
    undo.callback(random.setstate, random.getstate())
    undo.callback(np.random.set_state, np.random.get_state())
    if torch.cuda.is_available():
        undo.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
