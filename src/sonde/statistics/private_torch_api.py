"""Private names of torch. Each entry says what needs it and what happens in a version of torch that lacks it ("Gone: …").

No other module of Sonde uses a private name of torch; `tests/integration/test_architecture.py` checks it. Accepted everywhere, because
half of the ecosystem reads them and torch cannot drop them: the dictionaries `_modules`, `_parameters`, `_buffers` and `_forward_hooks` of
`nn.Module`.
"""

import contextlib
import importlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch._C._profiler import RecordScope as RecordScope
from torch._C._profiler import _EventType
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.data import dataloader

# The imports above are documented by torch in its tutorials and used by its own tools (torch.utils.flop_counter, torch.fx): dispatch modes
# trace operations, fake tensors forecast memory, tree_map_only changes the tensors in a batch, the profiler enums name its events.
# Gone: `import sonde.statistics.private_torch_api` fails, and with it the test suite under that version of torch.
ProfilerEventType = _EventType
disable_dispatch_modes = _disable_current_modes
current_dispatch_mode = _get_current_dispatch_mode


graph_task_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
"""-1 outside of backward. Tells recomputation in activation checkpointing from a forward of the training. Gone: a recomputed forward counts
as a second forward."""

tracing_state: Callable[[], Any] = getattr(torch._C, "_get_tracing_state", lambda: None)
"""None unless `torch.jit.trace` runs. Gone: forwards that are traced count as forwards of the training."""

num_function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 0)
num_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
"""How many TorchFunctionModes and TorchDispatchModes are active in this thread. Gone: 0, and a mode of the user sees calls of Sonde."""

_popped = threading.local()


def without_modes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of Sonde while no mode of the user is active: a mode that counts or changes operations must not see it. Gone:
    AttributeError where a mode is active, and the probe is disabled."""
    outer = getattr(_popped, "modes", ())
    _popped.modes = tuple(torch._C._pop_torch_function_stack() for _ in range(num_function_modes()))  # the innermost first
    try:
        if not num_dispatch_modes():
            return function(*args, **kwargs)
        with disable_dispatch_modes():
            return function(*args, **kwargs)
    finally:
        for mode in reversed(_popped.modes):
            torch._C._push_on_torch_function_stack(mode)
        _popped.modes = outer


@contextlib.contextmanager
def with_function_modes() -> Iterator[None]:
    """Inside of `without_modes`, for code of the user: his function modes (`torch.set_default_device` is one) are active again."""
    modes, _popped.modes = getattr(_popped, "modes", ()), ()
    for mode in reversed(modes):
        torch._C._push_on_torch_function_stack(mode)
    try:
        yield
    finally:
        for _ in modes:
            torch._C._pop_torch_function_stack()
        _popped.modes = modes


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
    """torch.compile passes over this function between the pieces that it compiles; with `recursive`, over what it calls too. Without it,
    torch.compile would compile our functions as well: more frames and graph breaks than without Sonde, and callbacks that believe for good
    that they are being compiled. Gone: a few functions of ours are compiled too."""
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        inner = _FrameAction.SKIP if recursive else _FrameAction.DEFAULT
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, inner))
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return


_HOOK_KEY = -1  # of our hook among a tensor's: torch numbers those of others from 0 up
_HAS_HOOK_DICT = hasattr(torch.autograd.graph.Node, "_register_hook_dict")


def add_gradient_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """`tensor.register_hook` without the handle, which nobody uses: 1.0 µs instead of 3.8 µs for every output of an observed step. Gone:
    `register_hook` is called."""
    if _HAS_HOOK_DICT and type(tensor) is torch.Tensor and tensor._backward_hooks is None and tensor.grad_fn is not None:
        tensor._backward_hooks = OrderedDict({_HOOK_KEY: hook})
        tensor.grad_fn._register_hook_dict(tensor)
    else:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]


# ---- tensors and storages

tensor_version: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Counts the in-place writes to a tensor. There is no public counter. Gone: AttributeError; the callers report it as an error of Sonde."""

storage_address: Callable[[Any], int] = attrgetter("_cdata")
"""Identifies a storage, also one without data (`data_ptr` of all of these is 0). Gone: AttributeError, reported as an error of Sonde."""

preserve_versions: Callable[[tuple[torch.Tensor, ...]], Any] = torch.autograd.grad_mode._unsafe_preserve_version_counter
"""Context: writes to these tensors do not increase their version, so a graph of the training that saved them stays valid when a replay
writes them and restores them. Gone: AttributeError on import."""

is_functorch_tensor: Callable[[torch.Tensor], bool] = getattr(
    getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", lambda _: False
)
"""Tensors inside of torch.func have no storage. Gone: such a tensor fails on its missing storage instead, with a less clear message."""

without_torch_function: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass
"""Context: `__torch_function__` of tensor subclasses is not called. Gone: AttributeError on import."""


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of autograd's zeros without memory. Gone: AttributeError, the tensor is not measured."""
    return tensor._is_zerotensor()


def sparse_values(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a sparse COO tensor; the public `values` refuses one that is not coalesced. Gone: the tensor is not measured."""
    return tensor._values()


def sparse_indices(tensor: torch.Tensor) -> torch.Tensor:
    """The indices of a sparse COO tensor; the public `indices` refuses one that is not coalesced. Gone: the tensor is not measured."""
    return tensor._indices()


def use_count(tensor: torch.Tensor) -> int:
    """The number of C++ references to a tensor, including the one of Python. Gone: 0, and leaks that only C++ holds are not found."""
    count = getattr(tensor, "_use_count", None)
    return int(count()) if callable(count) else 0


# ---- autograd

next_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next autograd node of this thread gets: it links a node to the forward operation that created it. Gone:
AttributeError on import."""

current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node that runs in this thread's backward. Gone: AttributeError on import."""


def node_sequence_nr(node: Any) -> int:
    """The number of an autograd node. Gone: 0 for all nodes, and they are visited in an arbitrary order."""
    read = getattr(node, "_sequence_nr", None)
    return int(read()) if read is not None else 0


def has_saved_tensor_hooks(*, ignore_tracing: bool) -> bool:
    """Whether hooks on saved tensors are active (activation checkpointing, offloading): reading a saved tensor then runs code."""
    return torch._C._autograd._top_saved_tensors_default_hooks(ignore_tracing) is not None


def saved_value(node: Any, name: str) -> Any:
    """What an autograd node saved under a name of its formula; None without it. Gone: None, and the operation stays unexplained."""
    return getattr(node, f"_saved_{name}", None)


def saved_value_handle(node: Any, name: str) -> Any:
    """The SavedTensor behind `saved_value`, which does not unpack it. Gone: None, and the training process reads nothing from the graph."""
    return getattr(node, f"_raw_saved_{name}", None)


def saved_value_names(node: Any) -> list[str]:
    """All names for `saved_value` of a node. Gone: empty."""
    return [name.removeprefix("_saved_") for name in dir(node) if name.startswith("_saved_")]


def gradient_device(node: Any) -> torch.device | None:
    """The device of the tensor that a node computed. Gone: None, and a transfer back to its device is not recognized."""
    metadata = getattr(node, "_input_metadata", None)
    return metadata[0].device if metadata else None


def custom_function(node: Any) -> type | None:
    """The `autograd.Function` of a user whose backward a node runs. Gone: None, and the node's own name is reported."""
    return getattr(type(node), "_forward_cls", None)


def has_accumulation_hooks(leaf: torch.Tensor) -> bool:
    """Whether something (DDP) runs after a gradient is accumulated. Gone: False, and such a leaf may be run again."""
    return bool(getattr(leaf, "_post_accumulate_grad_hooks", None))


# ---- operations

op_schema: Callable[[OpOverload], Any] = attrgetter("_schema")
"""Name, overload and arguments of an operation. Gone: AttributeError, reported as an error of Sonde."""

has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
"""Whether an operation has a kernel for a dispatch key: one without is composed of others. Gone: AttributeError on import."""

ITEM_OP = torch.ops.aten._local_scalar_dense.default
"""The operation of `tensor.item()`, which a fake tensor cannot run. Gone: AttributeError on import."""


def op_packet(func: Any) -> Any:
    """All overloads of an operation, by which FLOP formulas are registered. Gone: None, and no FLOPs are counted."""
    return getattr(func, "_overloadpacket", None)


class EagerDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that does not import torch's compiler, which takes seconds, only to mark itself as not compiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# ---- modules

CONV = (nn.modules.conv._ConvNd,)
CONV_TRANSPOSE = (nn.modules.conv._ConvTransposeNd,)
MAX_POOL = (nn.modules.pooling._MaxPoolNd,)
POOL = (*MAX_POOL, nn.modules.pooling._AvgPoolNd, nn.modules.pooling._LPPoolNd)
"""Base classes for layers of 1 to 3 dimensions. Gone: AttributeError on import."""

fan_in_and_fan_out: Callable[[torch.Tensor], tuple[int, int]] = nn.init._calculate_fan_in_and_fan_out
"""As torch's own initializations count them. Gone: AttributeError on import."""


def call_implementation(module: nn.Module) -> Callable[..., Any]:
    """The function that `module(...)` runs: the compiled one after `module.compile()`. Gone: AttributeError, the trial fails."""
    implementation: Callable[..., Any] = module._compiled_call_impl or module._call_impl
    return implementation


def replace_call_implementation(module: nn.Module, call: Callable[..., Any]) -> None:
    """Make `module(...)` run `call`, as `module.compile()` does: copies and pickles of the model do not inherit it. Gone: no effect, and
    the change measures as no gain."""
    module._compiled_call_impl = call


def is_compiler_loaded() -> bool:
    """Whether torch.compile has been used in this process. Gone: False, and compiled models are not switched to eager mode."""
    return "torch._dynamo" in sys.modules


def load_compiler() -> None:
    """Import torch.compile, which the first optimizer of a process does too. Gone: ImportError, every trial of `sonde tune` fails."""
    importlib.import_module("torch._dynamo")


# ---- optimizers, schedulers, gradient scaling


def is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a learning rate scheduler holds an optimizer. Gone: False, a scheduler made before the session is not known."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def has_optimizer_stepped(scheduler: Any) -> bool:
    """Whether the optimizer of a scheduler has stepped since the scheduler was made. Gone: False."""
    return bool(getattr(getattr(scheduler, "optimizer", None), "_opt_called", False))


def is_initial_scheduler_step(scheduler: Any) -> bool:
    """Whether a scheduler's constructor calls its `step`. Gone: False, and that call counts as one of the user."""
    return getattr(scheduler, "_is_initial", False)


def nested_schedulers(scheduler: Any) -> tuple[Any, ...]:
    """The schedulers inside of a SequentialLR or ChainedScheduler. Gone: none."""
    return tuple(getattr(scheduler, "_schedulers", ()))


def loss_scale_tensor(scaler: Any) -> torch.Tensor | None:
    """The loss scale of a GradScaler as a tensor: `get_scale` waits for the device. Gone: None, and the run holds no loss scale."""
    return getattr(scaler, "_scale", None)


GRAD_SCALER_STEP = "_maybe_opt_step"
"""The method of GradScaler that steps unless a gradient overflowed; replaced with fake tensors, which have no values to check. Gone:
AttributeError, and a dry run with a GradScaler reports it."""


# ---- data loaders


def iterator_dataset(iterator: Any) -> Any:
    """The dataset that an iterator of a DataLoader reads. Gone: None, and samples have no dataset index."""
    return getattr(iterator, "_dataset", None)


def iterator_position(iterator: Any) -> tuple[Any, int]:
    """The sampler of an iterator of a DataLoader and the number of batches that it has returned. Gone: (None, 0)."""
    return getattr(iterator, "_index_sampler", None), getattr(iterator, "_num_yielded", 0)


def num_prefetched_batches(iterator: Any) -> int:
    """Batches that the workers of an iterator have made and nobody has fetched. Gone: 0, and prefetched batches count as speed."""
    queue = getattr(iterator, "_data_queue", None)
    if queue is None:
        return 0
    num_early = sum(len(task) > 1 for task in iterator._task_info.values())  # made before an earlier one of another worker
    try:
        return num_early + int(queue.qsize())
    except NotImplementedError:  # macOS cannot count
        return num_early
