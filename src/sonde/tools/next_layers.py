"""What comes after each layer of a model, and which of its units ever fire: seen in a forward pass, or read from the order of modules.

The pass runs in eval mode without gradients and with the random state put back, so the model and the user's random numbers are as before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sonde.errors import SondeError
from sonde.statistics.tensor_utils import find_tensors
from sonde.tools.safe_hook import Contained

LAYERS = (nn.Linear, nn.modules.conv._ConvNd, nn.Bilinear)
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, getattr(nn, "RMSNorm", nn.LayerNorm), nn.LocalResponseNorm)
THROUGH = (nn.Dropout, nn.modules.dropout._DropoutNd, nn.Flatten, nn.Unflatten, nn.modules.pooling._MaxPoolNd, nn.Identity)
ACTIVATIONS = tuple(
    getattr(nn, name)
    for name in (
        "ReLU", "ReLU6", "LeakyReLU", "PReLU", "ELU", "SELU", "GELU", "SiLU", "Mish", "Hardswish", "Softplus", "Tanh", "Sigmoid",
        "Hardtanh", "Hardsigmoid", "Softmax", "LogSoftmax", "Threshold",
    )
)  # fmt: skip
FIRING = ("ReLU", "ReLU6")  # activations that are exactly zero where a unit does not fire
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "ReLU": functional.relu, "GELU": functional.gelu, "SiLU": functional.silu, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid,
}  # fmt: skip
NUM_COMPARED = 4096  # elements, to tell which function was called between two modules


@dataclass(slots=True)
class Followers:
    """`activation` of a layer: a class name, "normalisation", "" for none at all; a layer that is missing could not be told.

    `fired` counts, per unit, the values above zero that a ReLU let through; `num_seen` how many it saw per unit.
    """

    activation: dict[str, str] = field(default_factory=dict)
    fired: dict[str, Tensor] = field(default_factory=dict)
    num_seen: dict[str, int] = field(default_factory=dict)


def by_order(model: nn.Module) -> dict[str, str]:
    """What follows each layer inside of an nn.Sequential: there the order of modules is the order of calls."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.Sequential):
            continue
        children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
        for at, (name, child) in enumerate(children):
            if isinstance(child, LAYERS):
                kind = next((_kind(after) for _, after in children[at + 1 :] if not isinstance(after, THROUGH)), None)
                if kind is not None:
                    found[name] = kind
    return found


def _kind(module: nn.Module) -> str | None:
    if isinstance(module, NORMS):
        return "normalisation"
    if isinstance(module, ACTIVATIONS):
        return type(module).__name__
    return "" if isinstance(module, LAYERS) else None


def seen(model: nn.Module, data: Any) -> Followers:
    """Run the data through the model once and watch. What the pass does not show is taken from the order of modules."""
    watch = _Watch()
    with untouched(model), ExitStack() as hooks:
        for path, module in model.named_modules():
            if not module._modules:
                entering = Contained(f"the input of {path}", partial(watch.entering, path))
                leaving = Contained(f"the output of {path}", partial(watch.leaving, path))
                hooks.callback(module.register_forward_pre_hook(entering).remove)
                hooks.callback(module.register_forward_hook(leaving).remove)
        for args, kwargs in batches(data):
            try:
                model(*args, **kwargs)
            except Exception as error:
                raise SondeError(
                    f"The model could not be run with the data that you gave: {type(error).__name__}: {error}.\n"
                    "Give what its forward takes: one tensor, a tuple of arguments, a dict of keyword arguments, or a list of batches."
                ) from error
            watch.outputs.clear()
    for path, kind in by_order(model).items():
        watch.found.activation.setdefault(path, kind)
    return watch.found


def batches(data: Any) -> Iterator[tuple[Sequence[Any], Mapping[str, Any]]]:
    """Arguments for forward: one batch (a tensor, a tuple, a dict), or a list of batches."""
    for batch in data if isinstance(data, list) else [data]:
        if isinstance(batch, Mapping):
            yield (), batch
        else:
            yield (tuple(batch), {}) if isinstance(batch, tuple) else ((batch,), {})


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=[index for index in devices if index is not None]), torch.no_grad():
        try:
            model.eval()
            yield
        finally:
            for module, mode in modes:
                module.training = mode


@dataclass(slots=True)
class _Output:
    """What a layer put out, held weakly, with some of its numbers: a later module may have changed them in place."""

    layer: str
    channels: int  # the dimension of the units
    tensor: weakref.ref[Tensor]
    sample: Tensor
    shape: torch.Size


class _Watch:
    def __init__(self) -> None:
        self.found = Followers()
        self.outputs: dict[int, _Output] = {}
        self.last: _Output | None = None

    def entering(self, path: str, module: nn.Module, args: Any) -> None:
        kind = _kind(module)
        for _, tensor in find_tensors(args)[:1]:
            source = self._source(tensor)
            if source is not None and kind is not None:
                self.found.activation.setdefault(source.layer, kind)
            elif source is None and self.last is not None:
                self._function_between(self.last, tensor)

    def leaving(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        made, used = find_tensors(output)[:1], find_tensors(args)[:1]
        if not made:
            return
        tensor = made[0][1]
        if isinstance(module, LAYERS):
            channels = 1 if isinstance(module, nn.modules.conv._ConvNd) and tensor.ndim > 2 else tensor.ndim - 1
            self.last = self._keep(_Output(path, channels, weakref.ref(tensor), _sample(tensor), tensor.shape))
            return
        source = self._source(used[0][1]) if used else None
        if source is None:
            return
        if isinstance(module, ACTIVATIONS):
            if type(module).__name__ in FIRING:
                self._count(source, tensor)
        elif isinstance(module, (*NORMS, *THROUGH)) and tensor.shape == source.shape:
            # The unit is still the layer's own after these; what follows now follows it.
            self._keep(_Output(source.layer, source.channels, weakref.ref(tensor), _sample(tensor), tensor.shape))

    def _keep(self, output: _Output) -> _Output:
        self.outputs[id(output.tensor())] = output
        return output

    def _source(self, tensor: Tensor) -> _Output | None:
        known = self.outputs.get(id(tensor))
        return known if known is not None and known.tensor() is tensor else None

    def _function_between(self, source: _Output, tensor: Tensor) -> None:
        """A function was called between the layer and the next module: which one, by its values."""
        if tensor.shape != source.shape or source.layer in self.found.activation or not tensor.is_floating_point():
            return
        sample = _sample(tensor)
        for name, function in FUNCTIONS.items():
            if torch.allclose(function(source.sample), sample, rtol=1e-4, atol=1e-6):
                self.found.activation[source.layer] = name
                if name in FIRING:
                    self._count(source, tensor)
                return

    def _count(self, source: _Output, tensor: Tensor) -> None:
        """The layer's units are counted where its own ReLU put them out."""
        fired = (tensor > 0).movedim(source.channels, -1).flatten(0, -2).sum(0) if tensor.ndim > 1 else (tensor > 0).long()
        known = self.found.fired.get(source.layer)
        fired = fired.cpu()
        self.found.fired[source.layer] = fired if known is None or known.shape != fired.shape else known + fired
        self.found.num_seen[source.layer] = self.found.num_seen.get(source.layer, 0) + tensor.numel() // max(fired.numel(), 1)


def _sample(tensor: Tensor) -> Tensor:
    """The first numbers, in a copy."""
    return tensor.detach().reshape(-1)[:NUM_COMPARED].clone()
