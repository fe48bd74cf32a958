"""Other processes train with this one. What is run again here they do not run again, so nothing of it may speak to them: they would not
answer, and everybody would wait for ever.

DistributedDataParallel is stepped around: its forward sends buffers about and makes ready to average gradients, the module in it does
neither. Any other attempt to speak ends the second run with a reason, before a word is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from sonde.replay.capsule.replay_capsule import moved
from sonde.replay.program_slice import CannotReplay

CAVEAT = "{num} processes train together: this one was run again alone, on its own part of the batch and without averaging gradients"

_SPEAKS = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})
_SHARDED = frozenset({"FullyShardedDataParallel", "FSDPModule"})


def num_processes() -> int:
    """That train together, this one among them."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


@contextmanager
def alone(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, these modules can be run by this process alone. Raises `CannotReplay` where they cannot be."""
    if num_processes() == 1:
        yield
        return
    every = list({id(part): part for module in modules for part in module.modules()}.values())
    for part in every:
        # Gathering its weights is the first thing that such a part does, and stopping it midway would leave it in pieces.
        kinds = {kind.__name__ for kind in type(part).__mro__} | {type(p).__name__ for p in part._parameters.values()}
        if kinds & {*_SHARDED, "DTensor"}:
            raise CannotReplay("the weights are spread over several processes, which would have to run the step again together")
    with ExitStack() as undo:
        for part in every:
            if isinstance(part, nn.parallel.DistributedDataParallel) and "forward" not in part.__dict__:
                part.__dict__["forward"] = _Inner(part)
                undo.callback(part.__dict__.pop, "forward", None)
        yield


def silence() -> AbstractContextManager[Any]:
    """Around what is run again, inside of whatever looks at it: whoever would speak to another process raises `CannotReplay` instead."""
    return _Silence() if num_processes() > 1 else nullcontext()  # type: ignore[no-untyped-call]


class _Inner:
    """Stands in for the forward of a DistributedDataParallel."""

    def __init__(self, wrapper: nn.Module) -> None:
        self.wrapper = wrapper

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inner: Any = self.wrapper.module
        return inner(*moved(args, inner), **moved(kwargs, inner))


class _Silence(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as the tracer's: it would load the whole compiler to say that nothing is compiled here

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if isinstance(func, OpOverload) and func.namespace in _SPEAKS:
            name = func._schema.name.partition("::")[2].strip("_")
            raise CannotReplay(f"it would speak to the other processes ({name}), which do not run the step again")
        return func(*args, **(kwargs or {}))
