"""What a model is made of: parameters, layers, how deep it is, and how far its convolutions see.

Depth and receptive field are read from the autograd graph of one forward pass: only there is it known what follows what, and what runs
side by side. Without a pass they are read from the order of modules where an nn.Sequential gives one, and an upper bound else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sonde.diagnostics.data import MIB, ModelArchitectureInfo
from sonde.errors import SondeError
from sonde.replay.restore_state import state_restored
from sonde.statistics.tensor_utils import find_tensors, storage_bytes
from sonde.tools.next_layers import batches, untouched
from sonde.tools.safe_hook import Contained

MOST_NODES = 200_000  # of a graph that are walked through: beyond, the pass tells nothing
POOLS = (nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd, nn.modules.pooling._LPPoolNd)
CONVOLUTIONS = (nn.modules.conv._ConvNd,)
NO_ORDER = "not known without the order of the convolutions: give a batch with inspect(model, inputs)"


@dataclass(frozen=True, slots=True)
class _Reach:
    """What lies between the input and one tensor: layers with weights, and what one unit sees of the input."""

    depth: int = 0
    field: tuple[int, ...] = ()
    stride: tuple[float, ...] = ()


def inspect_architecture(model: nn.Module, inputs: Any = None) -> ModelArchitectureInfo:
    """`inputs` is one batch for forward: a tensor, a tuple of arguments, a dict of keyword arguments. The model is left as it was."""
    if not isinstance(model, nn.Module):
        raise SondeError(f"inspect takes a torch.nn.Module, not a {type(model).__name__}.")
    body = getattr(model, "_orig_mod", model)  # a compiled model would hide what its modules do
    parameters = [p for p in body.parameters() if not nn.parameter.is_lazy(p)]
    modules = list(_modules(body))
    leaves = [module for module in modules if not _children(module)]
    own = [module for module in modules if list(_weights(module))]
    weighted = [module for module in own if _num_steps(module)]
    has_convolutions = any(isinstance(module, CONVOLUTIONS) for module in leaves)
    reach, how = _by_pass(body, inputs) if inputs is not None else (None, "")
    if reach is None:
        reach, order = _by_order(body)
        how = how or order
    if reach is None:
        reach = _Reach(sum(map(_num_steps, weighted)))
        how = f"the number of layers, which is the most it can be{'; ' + how if how else ': give inputs to follow the model'}"
    return ModelArchitectureInfo(
        total_parameters=sum(p.numel() for p in parameters),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        model_size_mb=storage_bytes([*parameters, *(b for b in body.buffers() if not nn.parameter.is_lazy(b))]) / MIB,
        layer_count=len(own),
        layer_types=dict(Counter(type(module).__name__ for module in leaves).most_common()),
        depth=reach.depth,
        depth_known_by=how,
        width=max((p.shape[0] for layer in weighted for p in _weights(layer) if not nn.parameter.is_lazy(p) and p.ndim > 1), default=None),
        receptive_field=reach.field or None,
        receptive_stride=reach.stride or None,
        receptive_note=NO_ORDER if has_convolutions and not reach.field else "",
        name=type(body).__name__,
    )


def _children(module: nn.Module) -> list[nn.Module]:
    """Without those that only make its weights (torch.nn.utils.parametrize), or are never called."""
    if isinstance(module, nn.MultiheadAttention):
        return []
    return [child for name, child in module._modules.items() if child is not None and name != "parametrizations"]


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """All of them, each once, in their order."""
    waiting, seen = [model], set[int]()
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            waiting.extend(reversed(_children(module)))


def _weights(module: nn.Module) -> Iterator[Tensor]:
    """Parameters of its own, before and after they are parametrized."""
    if isinstance(module, nn.MultiheadAttention):
        yield from module.parameters()
        return
    yield from (p for p in module._parameters.values() if p is not None)
    if "parametrizations" in module._modules:
        yield from module._modules["parametrizations"].parameters()  # type: ignore[union-attr]


def _num_steps(module: nn.Module) -> int:
    """Layers with weights that run one after the other inside this module, its children left out."""
    if isinstance(module, nn.RNNBase):
        return module.num_layers
    if isinstance(module, nn.MultiheadAttention):
        return 2  # into queries, keys and values, and out
    if _children(module):
        return 0  # a class token or positions, beside the layers
    return int(any(nn.parameter.is_lazy(p) or p.ndim > 1 for p in _weights(module)))


def _after(module: nn.Module, before: _Reach) -> _Reach:
    """What lies before the output of this module, given what lies before its input."""
    depth = before.depth + _num_steps(module)
    if not isinstance(module, (*CONVOLUTIONS, *POOLS)):
        return _Reach(depth, before.field, before.stride)
    kernel = module.kernel_size
    dims = len(kernel) if isinstance(kernel, tuple) else int(type(module).__name__[-2])
    kernels, strides, dilations = (_each(getattr(module, name, 1), dims) for name in ("kernel_size", "stride", "dilation"))
    field, jump = before.field or (1,) * dims, before.stride or (1.0,) * dims
    if len(field) != dims:  # a convolution over other dimensions than those before it
        return _Reach(depth, before.field, before.stride)
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        # One unit is fed by every stride-th place of its kernel, whose inputs lie one input apart.
        jump = tuple(step / stride for step, stride in zip(jump, strides))
        reached = (-(-((k - 1) * d + 1) // s) - 1 for k, d, s in zip(kernels, dilations, strides))
        field = tuple(int(f + num * s * step) for f, num, s, step in zip(field, reached, strides, jump))
        return _Reach(depth, field, jump)
    field = tuple(int(f + (k - 1) * d * step) for f, k, d, step in zip(field, kernels, dilations, jump))
    return _Reach(depth, field, tuple(step * stride for step, stride in zip(jump, strides)))


def _each(value: Any, dims: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (int(value),) * dims


def _by_order(model: nn.Module) -> tuple[_Reach | None, str]:
    """Of a model that is nn.Sequential all the way down: there the order of modules is the order of calls."""
    leaves = list(_in_order(model))
    if not leaves or any(leaf is None for leaf in leaves):
        return None, ""
    reach = _Reach()
    for leaf in leaves:
        assert leaf is not None
        reach = _after(leaf, reach)
    return reach, "the order of modules"


def _in_order(module: nn.Module) -> Iterator[nn.Module | None]:
    if not _children(module):
        yield module
    elif type(module) is nn.Sequential:
        for child in module:
            yield from _in_order(child)
    else:
        yield None


def _by_pass(model: nn.Module, inputs: Any) -> tuple[_Reach | None, str]:
    (args, kwargs), *more = batches(inputs)
    if more:
        raise SondeError(f"inspect takes one batch, not a list of {len(more) + 1}.")
    seen = _Seen()
    asked = [module for module in _modules(model) if _num_steps(module) or isinstance(module, POOLS)]
    with state_restored([model]), untouched(model), torch.enable_grad(), ExitStack() as hooks:
        for module in asked:
            hooks.callback(module.register_forward_hook(Contained(type(module).__name__, seen.leaving)).remove)
        try:
            output = model(*_with_gradients(args), **_with_gradients(kwargs))
        except Exception as error:
            raise SondeError(
                f"the model could not be run with the inputs that you gave: {type(error).__name__}: {error}.\n"
                "Give what its forward takes: a tensor, a tuple of arguments, or a dict of keyword arguments."
            ) from error
        reach = seen.before([tensor for _, tensor in find_tensors(output)])
    if reach is None or not seen.num_calls:
        return None, "the pass left no graph to follow"
    return reach, "a forward pass"


def _with_gradients(value: Any) -> Any:
    """The same inputs, of which autograd follows what comes: a frozen model would leave no graph else."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_() if value.is_floating_point() or value.is_complex() else value
    if isinstance(value, dict):
        return {name: _with_gradients(item) for name, item in value.items()}
    return type(value)(map(_with_gradients, value)) if type(value) in (list, tuple) else value


class _Seen:
    """The nodes of the graph at which a layer's output begins, with what lies before them."""

    def __init__(self) -> None:
        self.known: dict[Any, _Reach] = {}
        self.num_calls = self.num_nodes = 0

    def leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        made = [tensor for _, tensor in find_tensors(output) if tensor.grad_fn is not None]
        before = self.before(made)
        if before is None:
            return
        self.num_calls += 1
        after = _after(module, before)
        for tensor in made:
            self.known[tensor.grad_fn] = after

    def before(self, tensors: list[Tensor]) -> _Reach | None:
        """What lies before these tensors, over all ways back to a layer that is known; None where the graph is too large."""
        start = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        if tensors and not start:
            return None
        waiting, visited, found = list(start), set(start), _Reach()
        while waiting:
            node = waiting.pop()
            reach = self.known.get(node)
            if reach is not None:
                found = _joined(found, reach)
                continue
            self.num_nodes += 1
            if self.num_nodes > MOST_NODES:
                return None
            for further, _ in node.next_functions:
                if further is not None and further not in visited:
                    visited.add(further)
                    waiting.append(further)
        return found


def _joined(a: _Reach, b: _Reach) -> _Reach:
    if len(a.field) != len(b.field):
        a, b = (a, b) if len(a.field) > len(b.field) else (b, a)
        return _Reach(max(a.depth, b.depth), a.field, a.stride)
    wide = tuple(map(max, a.field, b.field))
    return _Reach(max(a.depth, b.depth), wide, tuple(map(max, a.stride, b.stride)))
