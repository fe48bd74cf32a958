"""Replays a capsule with a model of the user: sets its weights and the random state, and traces every operation."""

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from sonde.capture.save_and_restore_model import state_restored
from sonde.errors import SondeError
from sonde.formatting import listing
from sonde.nonfinite.operation_tracer import NonFiniteTracer, is_finite
from sonde.nonfinite.origin_types import Origin
from sonde.replay.capsule.create_capsule import Capsule, StoredTensor
from sonde.replay.capsule.value_serialization import LeftOut, fill_left_out
from sonde.statistics.find_tensors import find_tensors
from sonde.statistics.private_torch_api import tree_map_only

MT19937_WORDS = 624  # in the state of NumPy's generator


def replay(capsule: Capsule, model: nn.Module, loss_fn: Callable[..., Tensor] | None = None) -> Origin | None:
    """Replays a capsule and returns the origin of its non-finite number; None if all numbers are finite this time.

    Args:
        model: a model with the same class name, parameters and buffers. Its state, weights included, is restored afterwards.
        loss_fn: called as `loss_fn(output, **loss_inputs)` with the capsule's loss inputs, or positionally if its parameters have other
            names. Without it, the loss is the sum of the model's outputs.

    Raises `SondeError` if the model does not match the capsule, or if the model or the loss fails.
    """
    if not isinstance(model, nn.Module):
        raise SondeError(f"model must be a torch.nn.Module as in the capsule ({capsule.model_class}), not a {type(model).__name__}.")
    reason = mismatch(capsule, model)
    if reason:
        raise SondeError(f"The model does not match {capsule.path}: {reason}.")
    with state_restored([model]), _weights_restored(model), ExitStack() as stack:
        caveats = apply_to_model(capsule, model)
        args, kwargs, loss_inputs = (move_to_model(value, model) for value in (capsule.args, capsule.kwargs, capsule.loss_inputs))
        caveats += [f"{missing} is not in the capsule: None was used" for missing in _left_out_inputs((args, kwargs))]
        stack.enter_context(torch.set_grad_enabled(capsule.is_grad_enabled))
        for device, dtype in capsule.autocast.items():
            stack.enter_context(torch.autocast(device, dtype=dtype))
        tracer = stack.enter_context(NonFiniteTracer({"": model}))
        origin = None
        try:
            output = model(*fill_left_out(args, None), **fill_left_out(kwargs, None))
            loss = _sum_of_outputs(output) if loss_fn is None else _loss(loss_fn, output, loss_inputs)
            if loss_fn is None:
                caveats.append("there is no loss_fn: the sum of the model's outputs was used as the loss")
            if isinstance(loss, Tensor) and not is_finite(loss.detach()):
                origin = tracer.origin_of(loss)
            elif isinstance(loss, Tensor) and loss.requires_grad:
                parameters = [p for p in model.parameters() if p.requires_grad]
                torch.autograd.grad(loss.sum(), parameters, allow_unused=True)
        except SondeError:
            raise
        except Exception as error:
            raise SondeError(f"The model or the loss failed on the inputs of {capsule.path}: {type(error).__name__}: {error}") from error
    return with_caveats(origin or tracer.origin, caveats)


def with_caveats(origin: Origin | None, caveats: Sequence[str]) -> Origin | None:
    """The origin as the result of a replay, with these caveats added."""
    return None if origin is None else replace(origin, how="replayed", caveats=(*origin.caveats, *caveats))


def is_same_origin(one: Origin | None, other: Origin | None) -> bool:
    """Whether both are the same operation in the same module, at the same line or at a line with the same text."""
    if one is None or other is None:
        return one is other
    is_same = all(getattr(one, name) == getattr(other, name) for name in ("phase", "operation", "key"))
    return is_same and (one.source == other.source or one.text == other.text) and _is_same_module(one.module, other.module)


def _is_same_module(one: str, other: str) -> bool:
    """Whether the paths are equal; one may begin at the whole model, the other at the submodule that was called."""
    short, long = sorted((one, other), key=len)
    return long == short or not short or long.endswith(f".{short}")


# ---- matching a model


def mismatch(capsule: Capsule, model: nn.Module) -> str:
    """How a model differs from that of a capsule; "" if it matches."""
    if type(model).__name__ != capsule.model_class:
        return f"its class is {type(model).__name__}, the capsule's {capsule.model_class}"
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    return _difference("parameter", capsule.parameters, parameters) or _difference("buffer", capsule.buffers, buffers)


def _difference(what: str, stored: dict[str, StoredTensor], live: dict[str, Any]) -> str:
    if missing := [name for name in stored if name not in live]:
        return f"it has no {what} {listing(missing)}"
    if added := [name for name in live if name not in stored]:
        return f"it has a {what} {listing(added)} that the capsule does not have"
    for name, tensor in stored.items():
        if not nn.parameter.is_lazy(live[name]) and tuple(live[name].shape) != tensor.shape:
            return f"its {what} {name} is {list(live[name].shape)}, the capsule's {list(tensor.shape)}"
    return ""


def apply_to_model(capsule: Capsule, model: nn.Module) -> list[str]:
    """Sets the capsule's weights, buffers, training modes and random state. Returns caveats about those that could not be set."""
    live = dict(model.named_parameters()) | dict(model.named_buffers())
    stored = capsule.parameters | capsule.buffers
    missing = [name for name, tensor in stored.items() if tensor.values is None]
    with torch.no_grad():
        for name, tensor in stored.items():
            if tensor.values is not None:
                live[name].copy_(tensor.values)
    for path, module in model.named_modules():
        module.training = path in capsule.training
    caveats = [f"the capsule has no values of {listing(missing)}: the model's own were used"] if missing else []
    if capsule.rng is None:
        return [*caveats, "the capsule has no random state: dropout and other random operations differ"]
    try:
        _set_rng(capsule.rng if isinstance(capsule.rng, dict) else {})
    except (TypeError, ValueError, RuntimeError, LookupError, OverflowError) as error:
        caveats.append(f"the random state could not be set: {str(error).splitlines()[0]}")
    return caveats


def _set_rng(states: dict[Any, Any]) -> None:
    if isinstance(states.get("torch"), Tensor):
        torch.set_rng_state(states["torch"])
    if isinstance(states.get("python"), tuple):
        random.setstate(states["python"])
    if isinstance(states.get("numpy"), tuple):
        if not 0 <= states["numpy"][2] <= MT19937_WORDS:  # NumPy would read out of bounds
            raise ValueError("the position in NumPy's state is out of range")
        numpy.random.set_state(states["numpy"])
    if isinstance(states.get("cuda"), list) and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])


@contextmanager
def _weights_restored(model: nn.Module) -> Iterator[None]:
    before = [(tensor, tensor.detach().clone()) for tensor in model.parameters() if not nn.parameter.is_lazy(tensor)]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, values in before:
                tensor.copy_(values)


def move_to_model(value: Any, model: nn.Module) -> Any:
    """`value` with all tensors on the device of the model."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return value if device.type == "cpu" else tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


def _left_out_inputs(value: Any) -> list[str]:
    if isinstance(value, LeftOut):
        return [f"an input ({value.reason})"]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [description for item in items for description in _left_out_inputs(item)]


# ---- the loss


def _loss(loss_fn: Callable[..., Tensor], output: Any, inputs: dict[str, Any]) -> Tensor:
    signature = inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn)
    for args, kwargs in (((), inputs), (inputs.values(), {})):
        with suppress(TypeError):
            bound = signature.bind(output, *args, **kwargs)
            break
    else:
        names = ", ".join(["output", *inputs])
        raise SondeError(f"loss_fn takes {signature}, and is called with ({names}). Pass a function with these parameters.")
    return loss_fn(*bound.args, **bound.kwargs)


def _sum_of_outputs(output: Any) -> Tensor | None:
    parts = [tensor.sum() for _, tensor in find_tensors(output) if tensor.is_floating_point() and tensor.requires_grad]
    return torch.stack(parts).sum() if parts else None
