"""Names of torch that are not public. Each says what it is needed for and what happens where another version of torch lacks it.

Nothing else in Sonde reaches into torch's private parts for these.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import dataloader


def _no_graph_task() -> int:
    return -1


def _no_tracing_state() -> Any:
    return None


graph_task_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", _no_graph_task)
"""-1 outside of backward. Tells recomputation in activation checkpointing from a forward of the training. Gone: a recomputed forward counts
as a second forward."""

tracing_state: Callable[[], Any] = getattr(torch._C, "_get_tracing_state", _no_tracing_state)
"""None unless `torch.jit.trace` runs. Gone: forwards that are traced count as forwards of the training."""

DataLoaderIterator: type | None = getattr(dataloader, "_BaseDataLoaderIter", None)
"""Its `__next__` is where a training waits for a batch. Gone: waiting for data counts as other time."""

_dataset_kind = getattr(dataloader, "_DatasetKind", None)


def has_map_dataset(loader: Any) -> bool:
    """Whether a loader reads a dataset with a length. Asking a loader over an IterableDataset for its length makes it warn later. Gone: no
    loader has a known length."""
    return _dataset_kind is not None and getattr(loader, "_dataset_kind", None) == _dataset_kind.Map


def unwrap_compiled(model: Any) -> nn.Module | None:
    """The module inside of torch.compile's wrapper; None where there is no wrapper. Reads the dictionary of submodules, because a model's
    own `__getattr__` may do anything. Gone: the wrapper counts as the model."""
    modules = vars(model).get("_modules") if isinstance(model, nn.Module) else None
    inner = modules.get("_orig_mod") if isinstance(modules, dict) else None  # a ScriptModule has something else there
    return inner if isinstance(inner, nn.Module) else None


def compiled_wrapper() -> type[nn.Module] | None:
    """The class of torch.compile's wrapper, where torch.compile is loaded at all. Gone: forwards through a wrapper are seen only where the
    wrapper itself is watched."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    return getattr(module, "OptimizedModule", None)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile or `Module.compile()` compiles this module. Gone: a module compiled in place counts as eager."""
    return unwrap_compiled(module) is not None or getattr(module, "_compiled_call_impl", None) is not None


def is_profiling() -> bool:
    """Whether a torch profiler runs in this process: torch has one at a time. Gone: ours may fail to start, which is reported."""
    enabled = getattr(torch._C._autograd, "_profiler_enabled", None)
    return bool(enabled is not None and enabled())


DROPOUT: tuple[type[nn.Module], ...] = tuple(filter(None, [getattr(nn.modules.dropout, "_DropoutNd", None)])) or (nn.Dropout,)
"""Base class of all dropout layers. Gone: only `nn.Dropout` counts."""

BATCH_NORM: tuple[type[nn.Module], ...] = tuple(filter(None, [getattr(nn.modules.batchnorm, "_NormBase", None)])) or (nn.BatchNorm1d,)
"""Base class of all layers with running statistics. Gone: only `nn.BatchNorm1d` counts."""


def skip_in_dynamo(function: Callable[..., Any], *, recursive: bool) -> None:
    """torch.compile passes over this function between the pieces that it compiles; with `recursive`, over what it calls too.

    Without it, torch.compile would compile our functions as well: more frames and graph breaks than without Sonde, and callbacks that
    believe for good that they are being compiled. Gone: a few functions of ours are compiled too.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        inner = _FrameAction.SKIP if recursive else _FrameAction.DEFAULT
        set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, inner))
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return


_HOOK_KEY = -1  # of our hook among a tensor's: torch numbers those of others from 0 up


def add_gradient_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """`tensor.register_hook` without the handle, which nobody uses: 1.0 µs instead of 3.8 µs for every output of an observed step. Gone:
    `register_hook` is called."""
    if _HAS_HOOK_DICT and type(tensor) is torch.Tensor and tensor._backward_hooks is None and tensor.grad_fn is not None:
        tensor._backward_hooks = OrderedDict({_HOOK_KEY: hook})
        tensor.grad_fn._register_hook_dict(tensor)
    else:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]


_HAS_HOOK_DICT = hasattr(torch.autograd.graph.Node, "_register_hook_dict")
