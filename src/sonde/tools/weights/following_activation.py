"""The activation or normalization after each layer, by hooks in one forward pass or by the order in an `nn.Sequential`; active units."""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sonde.profiler.run_forward_pass import eval_mode_restored, forward_arguments, input_errors_explained
from sonde.statistics.find_tensors import find_tensors
from sonde.statistics.private_torch_api import BATCH_NORM, CONV, DROPOUT, MAX_POOL
from sonde.tools.hook_that_never_raises import SafeHook

LAYERS = (nn.Linear, *CONV, nn.Bilinear)
NORMS: tuple[type[nn.Module], ...] = (*BATCH_NORM, nn.LayerNorm, nn.GroupNorm, getattr(nn, "RMSNorm", nn.LayerNorm), nn.LocalResponseNorm)
PASS_THROUGH: tuple[type[nn.Module], ...] = (nn.Dropout, *DROPOUT, nn.Flatten, nn.Unflatten, *MAX_POOL, nn.Identity)
ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Softplus, nn.Tanh, nn.Sigmoid,
    nn.Hardtanh, nn.Hardsigmoid, nn.Softmax, nn.LogSoftmax, nn.Threshold,
)  # fmt: skip
ZEROING = ("ReLU", "ReLU6")  # activations that output exact zeros for negative inputs
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "ReLU": functional.relu, "GELU": functional.gelu, "SiLU": functional.silu, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid,
}  # fmt: skip
NUM_COMPARED = 4096  # elements that identify the function called between two modules


@dataclass(slots=True)
class NextLayers:
    """The activation after each layer, and counts of positive outputs per unit."""

    activation: dict[str, str] = field(default_factory=dict)  # class name, "normalization" or "" (none); unknown layers are missing
    num_positive: dict[str, Tensor] = field(default_factory=dict)  # per unit: values above zero after the layer's ReLU
    num_values: dict[str, int] = field(default_factory=dict)  # values per unit that this ReLU received


def next_layers_by_order(model: nn.Module) -> dict[str, str]:
    """The activation after each layer in an `nn.Sequential`, in which modules are called in their order."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.Sequential):
            continue
        children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
        for at, (name, child) in enumerate(children):
            if isinstance(child, LAYERS):
                kind = next((_kind(after) for _, after in children[at + 1 :] if not isinstance(after, PASS_THROUGH)), None)
                if kind is not None:
                    found[name] = kind
    return found


def _kind(module: nn.Module) -> str | None:
    if isinstance(module, NORMS):
        return "normalization"
    return type(module).__name__ if isinstance(module, ACTIVATIONS) else "" if isinstance(module, LAYERS) else None


def next_layers_by_forward(model: nn.Module, data: Any) -> NextLayers:
    """Runs the data through the model once. Layers that the pass does not settle are filled in by the order of modules. The pass runs in
    eval mode without gradients; modes and random state are restored."""
    observer = _ForwardObserver()
    with eval_mode_restored(model), ExitStack() as hooks:
        for path, module in model.named_modules():
            if not module._modules:
                before = SafeHook(f"the input of {path}", observer.on_forward_start)
                after = SafeHook(f"the output of {path}", partial(observer.on_forward_end, path))
                hooks.callback(module.register_forward_pre_hook(before).remove)
                hooks.callback(module.register_forward_hook(after).remove)
        for args, kwargs in forward_arguments(data):
            with input_errors_explained():
                model(*args, **kwargs)
            observer.outputs.clear()
    for path, kind in next_layers_by_order(model).items():
        observer.result.activation.setdefault(path, kind)
    return observer.result


@dataclass(slots=True)
class _LayerOutput:
    """The output of a layer as a weak reference, with a copy of some elements: a later module may change them in place."""

    layer: str
    channels: int  # the dimension of the units
    tensor: weakref.ref[Tensor]
    sample: Tensor
    shape: torch.Size


class _ForwardObserver:
    """Matches the input of each module with the output of the layer before it."""

    def __init__(self) -> None:
        self.result = NextLayers()
        self.outputs: dict[int, _LayerOutput] = {}
        self.last: _LayerOutput | None = None

    def on_forward_start(self, module: nn.Module, args: Any) -> None:
        kind = _kind(module)
        for _, tensor in find_tensors(args)[:1]:
            source = self._source(tensor)
            if source is not None and kind is not None:
                self.result.activation.setdefault(source.layer, kind)
            elif source is None and self.last is not None:
                self._function_between(self.last, tensor)

    def on_forward_end(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        made, used = find_tensors(output)[:1], find_tensors(args)[:1]
        if not made:
            return
        tensor = made[0][1]
        source = self._source(used[0][1]) if used else None
        if isinstance(module, LAYERS):
            self.last = self._store(path, 1 if isinstance(module, CONV) and tensor.ndim > 2 else tensor.ndim - 1, tensor)
        elif source is not None and isinstance(module, ACTIVATIONS) and type(module).__name__ in ZEROING:
            self._count(source, tensor)
        elif source is not None and isinstance(module, (*NORMS, *PASS_THROUGH)) and tensor.shape == source.shape:
            # These modules leave the units of the layer as they are, so the next module also follows the layer.
            self._store(source.layer, source.channels, tensor)

    def _store(self, layer: str, channels: int, tensor: Tensor) -> _LayerOutput:
        found = self.outputs[id(tensor)] = _LayerOutput(layer, channels, weakref.ref(tensor), _sample(tensor), tensor.shape)
        return found

    def _source(self, tensor: Tensor) -> _LayerOutput | None:
        known = self.outputs.get(id(tensor))
        return known if known is not None and known.tensor() is tensor else None

    def _function_between(self, source: _LayerOutput, tensor: Tensor) -> None:
        """Finds which function was called between the layer and the next module, by comparing values."""
        if tensor.shape != source.shape or source.layer in self.result.activation or not tensor.is_floating_point():
            return
        sample = _sample(tensor)
        for name, function in FUNCTIONS.items():
            if torch.allclose(function(source.sample), sample, rtol=1e-4, atol=1e-6):
                self.result.activation[source.layer] = name
                if name in ZEROING:
                    self._count(source, tensor)
                return

    def _count(self, source: _LayerOutput, tensor: Tensor) -> None:
        num_positive = (tensor > 0).movedim(source.channels, -1).flatten(0, -2).sum(0) if tensor.ndim > 1 else (tensor > 0).long()
        known, num_positive = self.result.num_positive.get(source.layer), num_positive.cpu()
        if known is not None and known.shape == num_positive.shape:
            num_positive += known
        self.result.num_positive[source.layer] = num_positive
        num_values = tensor.numel() // max(num_positive.numel(), 1)
        self.result.num_values[source.layer] = self.result.num_values.get(source.layer, 0) + num_values


def _sample(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:NUM_COMPARED].clone()
