"""Parameters, layers, depth and receptive field of a model: the latter two from the autograd graph of one forward pass, or without a pass
from the order of modules in an `nn.Sequential`; for other models the depth is then an upper bound."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sonde.capture.save_and_restore_model import state_restored
from sonde.diagnostics.user_supplied_metrics import MIB, ModelArchitectureInfo
from sonde.errors import SondeError
from sonde.profiler.run_forward_pass import eval_mode_restored, forward_arguments, input_errors_explained
from sonde.statistics.find_tensors import find_tensors, storage_bytes
from sonde.statistics.private_torch_api import CONV, CONV_TRANSPOSE, POOL
from sonde.tools.hook_that_never_raises import SafeHook, require_module

MAX_NODES = 200_000  # of the autograd graph; larger graphs are not searched
NO_ORDER = "not known without the order of the convolutions: pass a batch with inspect(model, inputs)"


@dataclass(frozen=True, slots=True)
class _PathToInput:
    """The longest path from the input to a tensor: layers with weights, and the receptive field of one element."""

    depth: int = 0
    field: tuple[int, ...] = ()  # receptive field per dimension
    stride: tuple[float, ...] = ()  # distance of neighboring elements in the input


def inspect_architecture(model: nn.Module, inputs: Any = None) -> ModelArchitectureInfo:
    """Reads the architecture. `inputs` is one batch for forward: a tensor, a tuple of arguments or a dict of keyword arguments. The model,
    its buffers and the random state are unchanged afterwards."""
    body = require_module(model, "inspect")  # hooks on modules do not fire in a compiled model
    parameters = [p for p in body.parameters() if not nn.parameter.is_lazy(p)]
    modules = list(_modules(body))
    leaves = [module for module in modules if not _children(module)]
    own = [module for module in modules if list(_weights(module))]
    weighted = [module for module in own if _num_steps(module)]
    has_convolutions = any(isinstance(module, CONV) for module in leaves)
    path, how = _path_by_forward(body, inputs) if inputs is not None else (None, "")
    if path is None:
        path, order = _path_by_order(body)
        how = how or order
    if path is None:
        path = _PathToInput(sum(map(_num_steps, weighted)))
        how = f"the number of layers, an upper bound{'; ' + how if how else ': pass inputs to trace the model'}"
    return ModelArchitectureInfo(
        total_parameters=sum(p.numel() for p in parameters), trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        model_size_mb=storage_bytes([*parameters, *(b for b in body.buffers() if not nn.parameter.is_lazy(b))]) / MIB, layer_count=len(own),
        layer_types=dict(Counter(type(module).__name__ for module in leaves).most_common()), depth=path.depth, depth_known_by=how,
        width=max((p.shape[0] for layer in weighted for p in _weights(layer) if not nn.parameter.is_lazy(p) and p.ndim > 1), default=None),
        receptive_field=path.field or None, receptive_stride=path.stride or None,
        receptive_note=NO_ORDER if has_convolutions and not path.field else "", name=type(body).__name__,
    )  # fmt: skip


def _children(module: nn.Module) -> list[nn.Module]:
    """The child modules, without parametrizations (torch.nn.utils.parametrize) and modules that are never called."""
    if isinstance(module, nn.MultiheadAttention):
        return []
    return [child for name, child in module._modules.items() if child is not None and name != "parametrizations"]


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """All modules in their order, each once."""
    waiting, visited = [model], set[int]()
    while waiting:
        module = waiting.pop()
        if id(module) not in visited:
            visited.add(id(module))
            yield module
            waiting.extend(reversed(_children(module)))


def _weights(module: nn.Module) -> Iterator[Tensor]:
    """The module's own parameters, including those of its parametrizations."""
    if isinstance(module, nn.MultiheadAttention):
        yield from module.parameters()
        return
    yield from (p for p in module._parameters.values() if p is not None)
    if "parametrizations" in module._modules:
        yield from module._modules["parametrizations"].parameters()  # type: ignore[union-attr]


def _num_steps(module: nn.Module) -> int:
    """Layers with weights that run in sequence inside this module, without its children."""
    if isinstance(module, nn.RNNBase):
        return module.num_layers
    if isinstance(module, nn.MultiheadAttention):
        return 2  # input projection and output projection
    if _children(module):
        return 0  # its own parameters are a class token or positions, not a layer
    return int(any(nn.parameter.is_lazy(p) or p.ndim > 1 for p in _weights(module)))


def _path_after(module: nn.Module, before: _PathToInput) -> _PathToInput:
    depth = before.depth + _num_steps(module)
    unchanged = _PathToInput(depth, before.field, before.stride)
    if not isinstance(module, (*CONV, *POOL)):
        return unchanged
    kernel = module.kernel_size
    dims = len(kernel) if isinstance(kernel, tuple) else int(type(module).__name__[-2])
    sizes = (getattr(module, name, 1) for name in ("kernel_size", "stride", "dilation"))
    kernels, strides, dilations = (tuple(size) if isinstance(size, (tuple, list)) else (int(size),) * dims for size in sizes)
    field, jump = before.field or (1,) * dims, before.stride or (1.0,) * dims
    if len(field) != dims:  # a convolution over other dimensions than the ones before
        return unchanged
    if isinstance(module, CONV_TRANSPOSE):
        # An output element uses every stride-th element of the kernel, and their inputs are neighbors.
        jump = tuple(step / stride for step, stride in zip(jump, strides))
        reached = (-(-((k - 1) * d + 1) // s) - 1 for k, d, s in zip(kernels, dilations, strides))
        field = tuple(int(f + num * s * step) for f, num, s, step in zip(field, reached, strides, jump))
        return _PathToInput(depth, field, jump)
    field = tuple(int(f + (k - 1) * d * step) for f, k, d, step in zip(field, kernels, dilations, jump))
    return _PathToInput(depth, field, tuple(step * stride for step, stride in zip(jump, strides)))


def _path_by_order(model: nn.Module) -> tuple[_PathToInput | None, str]:
    """The path of a model that consists only of nested nn.Sequential, which call their modules in order."""
    path = _PathToInput()
    for leaf in _leaves_of_sequentials(model):
        if _children(leaf):
            return None, ""
        path = _path_after(leaf, path)
    return path, "the order of modules"


def _leaves_of_sequentials(module: nn.Module) -> Iterator[nn.Module]:
    if type(module) is not nn.Sequential or not len(module):
        yield module
        return
    for child in module:
        yield from _leaves_of_sequentials(child)


def _path_by_forward(model: nn.Module, inputs: Any) -> tuple[_PathToInput | None, str]:
    (args, kwargs), *more = forward_arguments(inputs)
    if more:
        raise SondeError(f"inspect takes one batch, not a list of {len(more) + 1}.")
    tracker = _GraphTracker()
    hooked = [module for module in _modules(model) if _num_steps(module) or isinstance(module, POOL)]
    with state_restored([model]), eval_mode_restored(model), torch.enable_grad(), ExitStack() as hooks:
        for module in hooked:
            hooks.callback(module.register_forward_hook(SafeHook(type(module).__name__, tracker.on_forward_end)).remove)
        with input_errors_explained():
            output = model(*_requiring_grad(args), **_requiring_grad(kwargs))
        path = tracker.path_to([tensor for _, tensor in find_tensors(output)])
    if path is None or not tracker.num_calls:
        return None, "the forward pass has no autograd graph"
    return path, "a forward pass"


def _requiring_grad(value: Any) -> Any:
    """The inputs with requires_grad set: otherwise a frozen model would build no graph."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_() if value.is_floating_point() or value.is_complex() else value
    if isinstance(value, dict):
        return {name: _requiring_grad(item) for name, item in value.items()}
    return type(value)(map(_requiring_grad, value)) if type(value) in (list, tuple) else value


class _GraphTracker:
    """Maps the autograd node of each layer output to its path."""

    def __init__(self) -> None:
        self.paths: dict[Any, _PathToInput] = {}
        self.num_calls = self.num_nodes = 0

    def on_forward_end(self, module: nn.Module, args: Any, output: Any) -> None:
        outputs = [tensor for _, tensor in find_tensors(output) if tensor.grad_fn is not None]
        before = self.path_to(outputs)
        if before is not None:
            self.num_calls += 1
            self.paths |= dict.fromkeys((tensor.grad_fn for tensor in outputs), _path_after(module, before))

    def path_to(self, tensors: list[Tensor]) -> _PathToInput | None:
        """The longest path to these tensors, over all branches back to known layers; None if the graph is too large."""
        start = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        if tensors and not start:
            return None
        waiting, visited, found = list(start), set(start), _PathToInput()
        while waiting:
            node = waiting.pop()
            if node in self.paths:
                found = _longest(found, self.paths[node])
                continue
            self.num_nodes += 1
            if self.num_nodes > MAX_NODES:
                return None
            for next_node, _ in node.next_functions:
                if next_node is not None and next_node not in visited:
                    visited.add(next_node)
                    waiting.append(next_node)
        return found


def _longest(a: _PathToInput, b: _PathToInput) -> _PathToInput:
    depth = max(a.depth, b.depth)
    if len(a.field) == len(b.field):
        return _PathToInput(depth, tuple(map(max, a.field, b.field)), tuple(map(max, a.stride, b.stride)))
    longer = max(a, b, key=lambda path: len(path.field))
    return _PathToInput(depth, longer.field, longer.stride)
