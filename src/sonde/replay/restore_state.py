"""Everything that running a step again may change, as it was before: the training that goes on must not notice.

Generators, buffers, whatever modules keep in their attributes, training flags, grad mode, autocast, default dtype, gradients of
parameters. Parameters are only read by a forward and a backward; should one have been written to, it is put back too.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from sonde.replay.backward_call_site import names_of

_PLAIN = (list, dict, set)  # containers that a forward may fill: what is in them is put back, one level deep


@contextmanager
def as_before(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Whatever happens inside to the modules (and all that they hold) and to torch's global state is undone on leaving."""
    every = list({id(part): part for module in modules for part in module.modules()}.values())
    tensors = _tensors(every)
    with ExitStack() as undo:
        if tensors:  # the real graph may have saved a buffer, and asks at its backward whether anybody has written to it
            undo.enter_context(torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(tensors)))
        undo.callback(torch.set_default_dtype, torch.get_default_dtype())
        undo.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        _autocast(undo)
        _generators(undo)
        for part in every:
            undo.callback(_put_back, part, _state_of(part))
        for tensor in tensors:
            undo.callback(_write_back, tensor, tensor.detach().clone())
        for part in every:
            for p in part._parameters.values():
                if p is not None and not nn.parameter.is_lazy(p) and p.is_leaf:
                    undo.callback(_grad_back, p, p.grad)
        yield


def modules_in(frame: FrameType | None) -> list[nn.Module]:
    """Modules that the user's function can reach by name: a criterion has buffers too."""
    if frame is None:
        return []
    names = names_of(frame)
    owner = names.get("self")
    values = [*names.values(), *(vars(owner).values() if hasattr(owner, "__dict__") else ())]
    return [value for value in values if isinstance(value, nn.Module)]


def _state_of(part: nn.Module) -> dict[str, Any]:
    """The attributes of a module, its containers with what is in them."""
    return {name: (value, type(value)(value)) if type(value) in _PLAIN else (value, None) for name, value in part.__dict__.items()}


def _put_back(part: nn.Module, state: dict[str, Any]) -> None:
    for name in [name for name in part.__dict__ if name not in state]:
        del part.__dict__[name]
    for name, (value, content) in state.items():
        part.__dict__[name] = value
        if content is not None:
            _refill(value, content)


def _refill(container: Any, content: Any) -> None:
    if len(container) == len(content) and all(a is b for a, b in zip(_items(container), _items(content))):
        return
    container.clear()
    container.extend(content) if isinstance(container, list) else container.update(content)


def _items(container: Any) -> Iterator[Any]:
    if isinstance(container, dict):
        for key, value in container.items():
            yield key
            yield value
    else:
        yield from container


def _tensors(every: list[nn.Module]) -> list[Tensor]:
    """Buffers, and tensors that modules keep as attributes: both may be written in place by a forward."""
    found: dict[int, Tensor] = {}
    for part in every:
        for value in (*part._buffers.values(), *part.__dict__.values()):
            if isinstance(value, Tensor) and not nn.parameter.is_lazy(value) and value.layout == torch.strided and not value.is_inference():
                found[id(value)] = value
    return list(found.values())


def _write_back(tensor: Tensor, content: Tensor) -> None:
    # Always: batch norm writes its running statistics without counting up their version.
    with torch.no_grad():
        tensor.detach().copy_(content)


def _grad_back(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    if parameter.grad is not gradient:
        parameter.grad = gradient


def _autocast(undo: ExitStack) -> None:
    for device in ("cpu", "cuda"):
        undo.callback(torch.set_autocast_enabled, device, torch.is_autocast_enabled(device))
        undo.callback(torch.set_autocast_dtype, device, torch.get_autocast_dtype(device))


def _generators(undo: ExitStack) -> None:
    undo.callback(torch.set_rng_state, torch.get_rng_state())
    undo.callback(random.setstate, random.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        undo.callback(numpy.random.set_state, numpy.random.get_state())
    if torch.cuda.is_available():
        undo.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
