"""Replays a step on one rank of a distributed job. The other ranks do not take part, so a collective would hang.

`DistributedDataParallel` is bypassed: its forward broadcasts buffers and prepares the all-reduce of gradients, the module inside does
neither. Any other collective raises `CannotReplay` before it starts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from sonde.errors import CannotReplay
from sonde.replay.capsule.replay_capsule_with_model import move_to_model
from sonde.statistics.private_torch_api import EagerDispatchMode, OpOverload, op_schema

# Namespaces of the operators of torch.distributed.
_COLLECTIVES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})
_SHARDED = frozenset({"FullyShardedDataParallel", "FSDPModule"})


def num_processes() -> int:
    """The number of processes that train together, this one included."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def caveats_of_ranks() -> list[str]:
    """A caveat for the result of a replay if several processes train together."""
    what = "this one was run again alone, on its own part of the batch and without averaging gradients"
    return [f"{num_processes()} processes train together: {what}"] if num_processes() > 1 else []


@contextmanager
def without_ddp(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Bypasses `DistributedDataParallel` in these modules. Raises `CannotReplay` if their weights are sharded."""
    if num_processes() == 1:
        yield
        return
    every = list({id(part): part for module in modules for part in module.modules()}.values())
    for part in every:
        # Its forward begins with gathering the weights; an exception in the middle of that would leave them half gathered.
        kinds = {kind.__name__ for kind in type(part).__mro__} | {type(p).__name__ for p in part._parameters.values()}
        if kinds & {*_SHARDED, "DTensor"}:
            raise CannotReplay("the weights are sharded over several processes, which would have to run the step again together")
    with ExitStack() as undo:
        for part in every:
            if isinstance(part, nn.parallel.DistributedDataParallel) and "forward" not in part.__dict__:
                part.__dict__["forward"] = partial(_call_inner, part)
                undo.callback(part.__dict__.pop, "forward", None)
        yield


def forbid_collectives() -> AbstractContextManager[Any]:
    """Raises `CannotReplay` at any collective inside. Enter it after a tracer, so that the tracer does not record the collective."""
    return _ForbidCollectives() if num_processes() > 1 else nullcontext()  # type: ignore[no-untyped-call]


def _call_inner(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    return wrapper.module(*move_to_model(args, wrapper.module), **move_to_model(kwargs, wrapper.module))


class _ForbidCollectives(EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Raises at operators of `torch.distributed`."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if isinstance(func, OpOverload) and func.namespace in _COLLECTIVES:
            name = op_schema(func).name.partition("::")[2].strip("_")
            raise CannotReplay(f"it calls the collective {name}, and the other processes do not run the step again")
        return func(*args, **(kwargs or {}))
