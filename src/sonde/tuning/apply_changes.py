"""Applies the changes of a trial inside its process, and describes the loaders, optimizers and models of the script.

DataLoader, the optimizers of torch.optim and `nn.Module.__call__` (for the first steps) are patched. A model is changed at its first call
through the slot that `Module.compile()` uses: copies and pickles of the model do not inherit the change.
"""

import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from sonde.capture.monkeypatch import override
from sonde.capture.user_source_line import describe_line, user_frame
from sonde.capture.zero_grad_tracking import optimizer_parameters
from sonde.statistics.find_tensors import find_tensors
from sonde.statistics.private_torch_api import (
    DataLoaderIterator,
    call_implementation,
    is_compiled,
    num_prefetched_batches,
    replace_call_implementation,
    tree_map_only,
)
from sonde.tuning.trial_messages import CallSite, DataLoaderInfo, ModelInfo, OptimizerInfo

IMPLEMENTATIONS = ("foreach", "fused")
STEPS_SEARCHED = 3  # every trained model has run by then


def call_site_here() -> CallSite:
    """The innermost line of the user's code on the stack. Its key is the same in every process that runs the same script."""
    frame = user_frame(2)
    if frame is None:
        return CallSite("library", "in a library", "")
    line, text = describe_line(frame)
    return CallSite(f"{os.path.abspath(frame.f_code.co_filename)}:{frame.f_lineno}", line, text)


@dataclass(slots=True)
class LoaderUsage:
    """Counters of the loaders that one line creates for one dataset; a line may create a training and a validation loader."""

    info: DataLoaderInfo  # as created; `num_epochs` and `fed_share` are counted here
    num_epochs: int = 0
    has_fed_step: bool = False  # the current step has fetched from it
    num_fed_steps: int = 0
    iterator: weakref.ref[Any] | None = None  # the latest
    num_prefetched: int = 0  # batches ready at `start_measuring`
    num_batches: int = 0  # fetched since `start_measuring`
    num_samples: int = 0
    waited_s: float = 0.0


class DataLoaderPatcher:
    """Patches the constructor and the iteration of DataLoader for the rest of the process."""

    def __init__(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        self._changes = changes
        self._usages: dict[tuple[str, str, int], LoaderUsage] = {}  # by key of the call site, class and length of the dataset
        self._num_steps = 0
        self._sources: weakref.WeakKeyDictionary[Any, LoaderUsage] = weakref.WeakKeyDictionary()  # by loader or its iterator

    def install(self) -> None:
        """Never undone: the process ends with the trial."""
        override(DataLoader, "__init__", self._wrap_init)
        override(DataLoader, "__iter__", self._wrap_iter)
        override(DataLoaderIterator, "__next__", self._wrap_next)

    def _wrap_init(self, original: Any) -> Any:
        signature = inspect.signature(original)

        def __init__(loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
            site = call_site_here()
            change = self._changes.get(site.key)
            if change:
                bound = signature.bind(loader, *args, **kwargs)
                bound.arguments.update(change)
                args, kwargs = bound.args[1:], bound.kwargs
            original(loader, *args, **kwargs)
            self._add(loader, site)

        return __init__

    def _wrap_iter(self, original: Any) -> Any:
        def __iter__(loader: DataLoader[Any]) -> Any:
            iterator = original(loader)
            if loader in self._sources:
                self._sources[iterator] = usage = self._sources[loader]
                usage.num_epochs += 1
                usage.iterator = weakref.ref(iterator)
            return iterator

        return __iter__

    def _wrap_next(self, original: Any) -> Any:
        def __next__(iterator: Any) -> Any:
            began = perf_counter()
            batch = original(iterator)
            if (usage := self._sources.get(iterator)) is not None:
                usage.waited_s += perf_counter() - began
                usage.num_batches += 1
                usage.num_samples += num_samples(batch)
                usage.has_fed_step = True
            return batch

        return __next__

    def start_measuring(self) -> None:
        for usage in self._usages.values():
            usage.num_batches, usage.num_samples, usage.waited_s = 0, 0, 0.0
            usage.num_prefetched = num_prefetched(usage.iterator)

    def on_step_end(self) -> None:
        self._num_steps += 1
        for usage in self._usages.values():
            usage.num_fed_steps += usage.has_fed_step
            usage.has_fed_step = False

    def totals(self) -> tuple[int, float, float]:
        """Samples, waiting seconds and prefetched share since `start_measuring`, of the loaders that feed the training. Batches that were
        prefetched while the script started are faster than the loader is in the long run: `Trial` subtracts their share."""
        feeding = [usage for usage in self._usages.values() if 2 * usage.num_fed_steps >= self._num_steps]
        used = [(max(usage.num_prefetched - num_prefetched(usage.iterator), 0), usage.num_batches) for usage in feeding]
        shares = [num / num_batches for num, num_batches in used if num_batches]
        return sum(usage.num_samples for usage in feeding), sum(usage.waited_s for usage in feeding), min(max(shares, default=0.0), 1.0)

    def describe(self) -> tuple[DataLoaderInfo, ...]:
        num_steps = max(self._num_steps, 1)
        usages = self._usages.values()
        return tuple(replace(usage.info, num_epochs=usage.num_epochs, fed_share=usage.num_fed_steps / num_steps) for usage in usages)

    def _add(self, loader: DataLoader[Any], site: CallSite) -> None:
        settings = loader.num_workers, loader.batch_size, loader.pin_memory
        info = DataLoaderInfo(site, *settings, isinstance(loader.dataset, IterableDataset), loader.persistent_workers)
        self._sources[loader] = self._usages.setdefault((site.key, *_dataset_key(loader.dataset)), LoaderUsage(info))


def _dataset_key(dataset: Any) -> tuple[str, int]:
    """Equal for the datasets of two epochs, even if the script creates them anew; almost never equal for training and validation."""
    try:
        num = len(dataset)
    except Exception:  # raised by the user's dataset
        num = -1
    return type(dataset).__qualname__, num


def num_prefetched(reference: weakref.ref[Any] | None) -> int:
    """Batches that workers have made and the training has not fetched."""
    iterator = reference() if reference is not None else None
    return num_prefetched_batches(iterator) if iterator is not None else 0


def num_samples(batch: Any) -> int:
    """The first dimension of the first tensor that has one; 1 for a batch without such a tensor."""
    return next((tensor.shape[0] for _, tensor in find_tensors(batch) if tensor.dim()), 1)


class OptimizerPatcher:
    """Patches the constructors of torch.optim for the rest of the process."""

    def __init__(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        self._changes = changes
        self._optimizers: dict[tuple[str, str], OptimizerInfo] = {}

    def install(self) -> None:
        for kind in {each for each in vars(torch.optim).values() if isinstance(each, type) and issubclass(each, torch.optim.Optimizer)}:
            supports = tuple(name for name in IMPLEMENTATIONS if name in inspect.signature(kind).parameters)
            if supports and "__init__" in vars(kind):
                override(kind, "__init__", functools.partial(self._wrap_init, supports))

    def _wrap_init(self, supports: tuple[str, ...], original: Any) -> Any:
        def __init__(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            site = call_site_here()
            original(optimizer, *args, **{**kwargs, **self._changes.get(site.key, {})})
            self._add(optimizer, site, supports)

        return __init__

    def describe(self) -> tuple[OptimizerInfo, ...]:
        return tuple(self._optimizers.values())

    def _add(self, optimizer: torch.optim.Optimizer, site: CallSite, supports: tuple[str, ...]) -> None:
        name, parameters = type(optimizer).__name__, optimizer_parameters(optimizer)
        device = parameters[0].device.type if parameters else "cpu"
        self._optimizers[site.key, name] = OptimizerInfo(site, name, supports, implementation_of(optimizer, device), device)


def implementation_of(optimizer: torch.optim.Optimizer, device: str) -> str:
    """How an optimizer updates its parameters. The default of torch is the loop on a CPU and foreach on an accelerator."""
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return "fused"
    foreach = group.get("foreach")
    return "foreach" if foreach or (foreach is None and device != "cpu") else "loop"


class ModelPatcher:
    """Applies channels_last, autocast and compile to the models that the script calls, and describes them."""

    def __init__(self, changes: Sequence[str], num_expected: int) -> None:
        self._changes, self._num_expected = frozenset(changes), num_expected
        self._models: dict[int, tuple[nn.Module, ModelInfo]] = {}
        self._undo: Callable[[], None] | None = None  # while it searches
        self._thread = threading.local()

    def install(self) -> None:
        self._undo = override(nn.Module, "__call__", self._wrap_call)

    def _wrap_call(self, original: Any) -> Any:
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            is_trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters())
            if getattr(self._thread, "inside", False) or not is_trained:
                return original(module, *args, **kwargs)
            self._add(module, args, kwargs)
            self._thread.inside = True
            try:
                return original(module, *args, **kwargs)
            finally:
                self._thread.inside = False

        return __call__

    def on_step_end(self, num_steps: int) -> None:
        if num_steps >= STEPS_SEARCHED:
            self._stop_searching()

    def describe(self) -> tuple[ModelInfo, ...]:
        return tuple(model for _, model in self._models.values())

    def _stop_searching(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _add(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if id(module) in self._models:
            return
        self._models[id(module)] = module, _describe(module, args, kwargs)
        if self._changes:
            if "channels_last" in self._changes:
                module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stub
            replace_call_implementation(module, self._make_call(module))
        if len(self._models) == self._num_expected:
            self._stop_searching()

    def _make_call(self, module: nn.Module) -> Callable[..., Any]:
        plain = call_implementation(module)
        device = _device(module)
        images, half, compiles = (name in self._changes for name in ("channels_last", "autocast", "compile"))
        compiled: Callable[..., Any] | None = None

        def inner(*args: Any, **kwargs: Any) -> Any:
            return plain(*args, **kwargs)  # torch.compile skips functions in torch's own files, such as `plain` of a Sequential

        def as_channels_last(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal compiled
            if images:
                args, kwargs = tree_map_only(torch.Tensor, as_channels_last, (args, kwargs))
            # Compiles only after the search: the patched Module.__call__ must not be compiled.
            if compiles and compiled is None and self._undo is None:
                compiled = torch.compile(inner)
            with torch.autocast(device, torch.bfloat16) if half else nullcontext():
                output = (compiled or plain)(*args, **kwargs)
            # The loss is computed outside of autocast, from float32, as losses inside of autocast are.
            if not half:
                return output
            return tree_map_only(torch.Tensor, lambda each: each.float() if each.dtype == torch.bfloat16 else each, output)

        return call


def _device(module: nn.Module) -> str:
    return str(next(module.parameters()).device.type)


def _describe(module: nn.Module, args: Any, kwargs: Any) -> ModelInfo:
    device = _device(module)
    images = [tensor for _, tensor in find_tensors((args, kwargs)) if tensor.dim() == 4 and tensor.is_floating_point()]
    stored_last = (not each.is_contiguous() and each.is_contiguous(memory_format=torch.channels_last) for each in images)
    return ModelInfo(
        site=call_site_here(), name=_variable_name(module, user_frame()), device=device,
        is_float32=all(p.dtype == torch.float32 for p in module.parameters() if p.is_floating_point()),
        num_conv2d=sum(isinstance(part, nn.Conv2d) for part in module.modules()), takes_images=bool(images),
        is_channels_last=bool(images) and all(stored_last), in_autocast=torch.is_autocast_enabled(device), is_compiled=is_compiled(module),
    )  # fmt: skip


def _variable_name(module: nn.Module, frame: FrameType | None) -> str:
    """The variable that holds the model at its call, or the attribute of `self`."""
    if frame is not None:
        owner = frame.f_locals.get("self")
        for prefix, scope in (("", frame.f_locals), ("self.", getattr(owner, "__dict__", {})), ("", frame.f_globals)):
            for name, value in list(scope.items()):
                if value is module:
                    return f"{prefix}{name}"
    return "model"
